from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cotrain_workers.engine.decoding.stop_strings import SLACK_TOKENS, has_stop_string

if TYPE_CHECKING:
    from collections.abc import Sequence

SPECIAL = 256  # a token without text


def text_of(tokens: Sequence[int]) -> str:
    """Decode a byte per token."""
    return bytes(token for token in tokens if token != SPECIAL).decode(errors="replace")


def stops_at(text: str | bytes, *stops: str) -> int | None:
    """Return after how many bytes a generation stops."""
    tokens = list(text.encode() if isinstance(text, str) else text)
    for count in range(1, len(tokens) + 1):
        if has_stop_string(tokens[:count], stops, text_of):
            return count
    return None


def test_it_stops_with_the_last_byte_of_a_stop_string() -> None:
    assert stops_at("one two three", "two") == 7
    assert stops_at("one two three", "three", "two") == 7
    assert stops_at("one two three", "four") is None


@pytest.mark.parametrize("stop", ["é", "日本", "a😀b", "\n\n"])
def test_characters_of_several_bytes_count_once_complete(stop: str) -> None:
    before = "xyz é" if stop != "é" else "xyz e"

    assert stops_at(f"{before}{stop} and on", stop) == len(f"{before}{stop}".encode())


def test_bytes_that_are_no_text_neither_stop_nor_break() -> None:
    assert stops_at(b"\xff\xfe\x80 end \xe2\x82", "end") == 7


def test_a_long_stop_string_late_in_a_long_text() -> None:
    stop = "</answer>" * 5

    assert stops_at("word " * 300 + stop + "more", stop) == 1500 + len(stop)


def test_tokens_without_text_do_not_hide_a_stop_string() -> None:
    tokens = [*b"st", *[SPECIAL] * 50, *b"op"]

    assert has_stop_string(tokens, ("stop",), text_of)


def test_only_the_last_tokens_are_decoded() -> None:
    decoded = []

    def counting(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return text_of(tokens)

    has_stop_string(list(b"x" * 10_000), ("stop",), counting)

    assert sum(decoded) == 4 + SLACK_TOKENS


def test_as_many_tokens_are_decoded_as_a_stop_string_has_bytes() -> None:
    stop = "日本" * 10

    assert stops_at("word " * 20 + stop, stop) == 100 + len(stop.encode())
