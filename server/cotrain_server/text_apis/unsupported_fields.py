"""Fields of other APIs that are not served here: ignored where that changes nothing, else refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cotrain_server.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def refuse_unsupported(
    fields: Mapping[str, Any],
    harmless: Collection[str],
    neutral: Mapping[str, Collection[object]],
    where: str = "",
) -> None:
    """Look through the fields that a request's model does not know.

    `harmless` ones change no result whatever they hold; a `neutral` one must hold a value that asks
    for nothing. An unknown field is refused: its caller may count on it.

    Raises:
        Invalid: naming the first field that would have changed the result.
    """
    for name, value in fields.items():
        if value is None or name in harmless or value in neutral.get(name, ()):
            continue
        raise Invalid(f"{where}{name} is not supported here.")


def text_of(content: str | list[dict[str, Any]] | None, where: str) -> str:
    """Join the text parts of a message by newlines; raises Invalid at a part that is no text."""
    if isinstance(content, str) or content is None:
        return content or ""
    for number, part in enumerate(content):
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type")
            raise Invalid(
                f"{where}[{number}]: parts of type {kind!r} are not supported here; send text."
            )
    return "\n".join(part["text"] for part in content)
