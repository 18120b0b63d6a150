"""Text in, text out, by the server's own tokenizer: none is needed here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cotrain.commands.http import checked
from cotrain.errors import InternalServerError, MalformedMessage

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import httpx

COMPLETIONS, CHATS = "/oai/api/v1/completions", "/oai/api/v1/chat/completions"

Message = dict[str, str]
"""`role` and `content`."""


@dataclass(frozen=True)
class Asked:
    """How to sample; None is left to the server."""

    model: str
    """A base model, or the path of sampler weights."""
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None


def sample(http: httpx.Client, about: str | Sequence[Message], asked: Asked) -> dict[str, Any]:
    """Continue a text, or answer a chat; the answer as the server gives it. Raises APIStatusError."""
    path, body = _question(about, asked)
    answer: dict[str, Any] = checked(http.post(path, json=body)).json()
    return answer


def stream(http: httpx.Client, about: str | Sequence[Message], asked: Asked) -> Generator[str]:
    """Give the text in parts, as each becomes certain. Leaving it early cancels the sample.

    Raises APIStatusError, also in the middle.
    """
    path, body = _question(about, asked)
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        for line in checked(response).iter_lines():
            kind, _, content = line.partition(":")
            if kind == "data" and content.strip() != "[DONE]":
                yield _text_in(content)


def text_of(choice: dict[str, Any]) -> str:
    """Read the text of one choice, of whichever shape."""
    holder = choice.get("message") or choice.get("delta")
    return (holder["content"] if holder and "content" in holder else choice.get("text")) or ""


def _question(about: str | Sequence[Message], asked: Asked) -> tuple[str, dict[str, Any]]:
    how = {name: value for name, value in asdict(asked).items() if value is not None}
    if isinstance(about, str):
        return COMPLETIONS, {**how, "prompt": about}
    return CHATS, {**how, "messages": list(about)}


def _text_in(content: str) -> str:
    try:
        event = json.loads(content)
    except ValueError as error:
        raise MalformedMessage("the server streamed what is not JSON") from error
    if "error" in event:
        raise InternalServerError(event["error"].get("message", "it failed"), 500, event)
    return "".join(text_of(choice) for choice in event.get("choices", ()))
