"""Command `cotrain sample`: continue a text, or chat, in the terminal.

The server's tokenizer converts text, so the client needs none.
"""

import json
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Annotated, Any

import httpx
import typer

from cotrain.commands.terminal import AsJson, checked, failing_in_a_sentence, harmless, opened, plain_http, print_json
from cotrain.errors import InternalServerError, MalformedMessage
from cotrain.settings import client_settings

COMPLETIONS, CHATS = "/oai/api/v1/completions", "/oai/api/v1/chat/completions"

Message = dict[str, str]
"""`role` and `content`."""
Parameters = Mapping[str, Any]
"""Fields of a request besides its prompt; None selects the server's default."""


def sample_text(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; `-`: stdin. Without one: a chat.")] = None,
    model_path: Annotated[
        str | None, typer.Option(help="Sampler weights: tinker://<run>/sampler_weights/<name>")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="A base model as it is; needed where the server has several.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Answer PROMPT as the user's turn of a chat.")] = False,
    system: Annotated[str | None, typer.Option(help="System message before a chat.")] = None,
    num_samples: Annotated[int, typer.Option(min=1, max=128, help="Number of samples.")] = 1,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum number of tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 selects the likeliest token.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Total probability of the likeliest tokens to sample from.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text, or chat: one turn per line, Ctrl-C ends an answer, Ctrl-D the chat."""
    if model_path and base_model:
        raise typer.BadParameter("give --model-path or --base-model, not both")
    if prompt is None and (as_json or num_samples > 1):
        raise typer.BadParameter("--json and --num-samples need a PROMPT")
    if prompt == "-":
        prompt = typer.get_text_stream("stdin").read()
    model = model_path or base_model or _only_model()
    request: Parameters = {
        "model": model, "n": num_samples, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p,
        "seed": seed, "stop": stop or None,
    }  # fmt: skip
    before = [{"role": "system", "content": system}] if system else []
    with failing_in_a_sentence(), plain_http(client_settings()) as http:
        if prompt is None:
            _chat(http, before, request)
        elif chat or before:
            _sample(http, [*before, _user(prompt)], request, as_json)
        else:
            _sample(http, prompt, request, as_json)


def _only_model() -> str:
    with opened() as service:
        models = service.get_server_capabilities().supported_models
    names = [each.model_name for each in models if each.sampleable is not False and each.model_name]
    if len(names) != 1:
        raise typer.BadParameter(harmless(f"give --base-model: one of {', '.join(names) or 'none'}"))
    return names[0]


def _sample(http: httpx.Client, prompt: str | Sequence[Message], request: Parameters, as_json: bool) -> None:
    if as_json:
        print_json(_as_json(sample(http, prompt, request)))
    elif request["n"] == 1:
        for text in stream(http, prompt, request):
            _show(text)
        typer.echo()
    else:
        for number, choice in enumerate(sample(http, prompt, request)["choices"], 1):
            typer.echo(f"--- {number}")
            _show(text_of(choice) + "\n")


def _as_json(answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": answer["model"],
        "samples": [{"text": text_of(choice), "stop_reason": choice["finish_reason"]} for choice in answer["choices"]],
        "prompt_tokens": answer["usage"]["prompt_tokens"],
        "sampled_tokens": answer["usage"]["completion_tokens"],
    }


def _chat(http: httpx.Client, before: list[Message], request: Parameters) -> None:
    messages = list(before)
    while (line := _next_line()) is not None:
        if line.strip():
            messages.append(_user(line))
            messages.append({"role": "assistant", "content": _answer(http, messages, request)})


def _next_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        if sys.stdin.isatty():
            typer.echo()  # so that later output starts on a new line
        return None


def _answer(http: httpx.Client, messages: Sequence[Message], request: Parameters) -> str:
    """Print an answer while it arrives, and return it. Ctrl-C ends it and keeps the text so far."""
    shown: list[str] = []
    with suppress(KeyboardInterrupt), closing(stream(http, messages, request)) as texts:
        for text in texts:
            shown.append(text)
            _show(text)
    typer.echo()
    return "".join(shown)


def _show(text: str) -> None:
    """Print text of a model, without characters that control the terminal."""
    if sys.stdout.isatty():
        text = harmless(text)
    typer.echo(text, nl=False, color=True)  # otherwise click removes escapes from output to a file


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def sample(http: httpx.Client, prompt: str | Sequence[Message], request: Parameters) -> dict[str, Any]:
    """Continue a text, or answer a chat; returns the server's response. Raises APIStatusError."""
    path, body = _path_and_body(prompt, request)
    answer: dict[str, Any] = checked(http.post(path, json=body)).json()
    return answer


def stream(http: httpx.Client, prompt: str | Sequence[Message], request: Parameters) -> Generator[str]:
    """Yield the text in parts as they become final. Closing the generator early cancels the sample.

    Raises APIStatusError, also after the first part.
    """
    path, body = _path_and_body(prompt, request)
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        for line in checked(response).iter_lines():
            kind, _, content = line.partition(":")
            if kind == "data" and content.strip() != "[DONE]":
                yield _text_in(content)


def text_of(choice: dict[str, Any]) -> str:
    """Return the text of one choice, of a completion or of a chat."""
    holder = choice.get("message") or choice.get("delta")
    return (holder["content"] if holder and "content" in holder else choice.get("text")) or ""


def _path_and_body(prompt: str | Sequence[Message], request: Parameters) -> tuple[str, dict[str, Any]]:
    parameters = {name: value for name, value in request.items() if value is not None}
    if isinstance(prompt, str):
        return COMPLETIONS, {**parameters, "prompt": prompt}
    return CHATS, {**parameters, "messages": list(prompt)}


def _text_in(content: str) -> str:
    try:
        event = json.loads(content)
    except ValueError as error:
        raise MalformedMessage("the server streamed what is not JSON") from error
    if "error" in event:
        raise InternalServerError(event["error"].get("message", "it failed"), 500, event)
    return "".join(text_of(choice) for choice in event.get("choices", ()))
