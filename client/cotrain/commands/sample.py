"""`cotrain sample`: continue one text, or chat, in the terminal."""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotrain.commands.http import plain_http
from cotrain.commands.terminal import AsJson, failing_in_a_sentence, harmless, opened, print_json
from cotrain.commands.text_endpoints import Asked, sample, stream, text_of
from cotrain.settings import client_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    import httpx

    from cotrain.commands.text_endpoints import Message


def sample_text(
    prompt: Annotated[
        str | None, typer.Argument(help="What to continue; `-`: stdin. Without one: a chat.")
    ] = None,
    model_path: Annotated[
        str | None, typer.Option(help="Sampler weights: tinker://<run>/sampler_weights/<name>")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="A base model as it is; needed where the server has several.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer PROMPT as the user's turn of a chat.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="The system's words before a chat.")] = None,
    num_samples: Annotated[int, typer.Option(min=1, max=128, help="How many.")] = 1,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens at most.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0: the likeliest.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Of the likeliest tokens, so much in all.")
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
    asked = Asked(model, num_samples, max_tokens, temperature, top_p, seed, stop or None)
    before = [{"role": "system", "content": system}] if system else []
    with failing_in_a_sentence(), plain_http(client_settings()) as http:
        if prompt is None:
            _chat(http, before, asked)
        elif chat or before:
            _sample(http, [*before, _user(prompt)], asked, as_json)
        else:
            _sample(http, prompt, asked, as_json)


def _only_model() -> str:
    with opened() as service:
        models = service.get_server_capabilities().supported_models
    names = [each.model_name for each in models if each.sampleable is not False and each.model_name]
    if len(names) != 1:
        raise typer.BadParameter(
            harmless(f"give --base-model: one of {', '.join(names) or 'none'}")
        )
    return names[0]


def _sample(
    http: httpx.Client, about: str | Sequence[Message], asked: Asked, as_json: bool
) -> None:
    if as_json:
        print_json(_as_json(sample(http, about, asked)))
    elif asked.n == 1:
        for text in stream(http, about, asked):
            _show(text)
        typer.echo()
    else:
        for number, choice in enumerate(sample(http, about, asked)["choices"], 1):
            typer.echo(f"--- {number}")
            _show(text_of(choice) + "\n")


def _as_json(answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": answer["model"],
        "samples": [
            {"text": text_of(choice), "stop_reason": choice["finish_reason"]}
            for choice in answer["choices"]
        ],
        "prompt_tokens": answer["usage"]["prompt_tokens"],
        "sampled_tokens": answer["usage"]["completion_tokens"],
    }


def _chat(http: httpx.Client, before: list[Message], asked: Asked) -> None:
    messages = list(before)
    while (line := _next_line()) is not None:
        if line.strip():
            messages.append(_user(line))
            messages.append({"role": "assistant", "content": _answer(http, messages, asked)})


def _next_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        if sys.stdin.isatty():
            typer.echo()  # what comes next begins a line
        return None


def _answer(http: httpx.Client, messages: Sequence[Message], asked: Asked) -> str:
    """Print an answer as it comes, and return it. Ctrl-C ends it and keeps what came."""
    shown: list[str] = []
    with suppress(KeyboardInterrupt), closing(stream(http, messages, asked)) as texts:
        for text in texts:
            shown.append(text)
            _show(text)
    typer.echo()
    return "".join(shown)


def _show(text: str) -> None:
    """Print text of a model, which may have sampled what makes a terminal do things."""
    if sys.stdout.isatty():
        text = harmless(text)
    typer.echo(text, nl=False, color=True)  # else click takes escapes out of what goes to a file


def _user(content: str) -> Message:
    return {"role": "user", "content": content}
