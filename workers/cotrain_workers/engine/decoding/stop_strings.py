"""Whether the newest token ends a generation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotrain_workers.engine.decoding.requests import SampleRequest, TextOf

# A window may begin inside a character, and some tokenizers drop a space before their first token.
SLACK_TOKENS = 8


def has_stopped(tokens: Sequence[int], request: SampleRequest, text_of: TextOf | None) -> bool:
    """Return whether the newest of `tokens` ends what a request generates. Call it after every token."""
    if tokens[-1] in request.stop_tokens:
        return True
    if not request.stop_strings:
        return False
    assert text_of is not None
    return has_stop_string(tokens, request.stop_strings, text_of)


def has_stop_string(tokens: Sequence[int], stops: Sequence[str], text_of: TextOf) -> bool:
    """Return whether the text of `tokens` ends a stop string with its newest token.

    Call it after every token: then any stop string in the text is new, and only the last tokens need be
    decoded, about as many as the longest stop string has bytes. A character counts once all its bytes are
    there.
    """
    longest = max(len(stop.encode()) for stop in stops)
    window = longest + SLACK_TOKENS
    while True:
        text = text_of(tokens[-window:])
        if any(stop in text for stop in stops):
            return True
        # Tokens without text of their own (special ones) make the window shorter than it looks.
        if window >= len(tokens) or len(text.encode()) >= longest + SLACK_TOKENS:
            return False
        window *= 2
