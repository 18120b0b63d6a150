from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from cotrain_workers.engine.decoding.requests import TextOf
from cotrain_workers.engine.decoding.stop_strings import (
    CHARACTER_TOKENS,
    MAX_PENDING,
    ReadText,
    StopStrings,
    has_stop_string,
    prompt_end,
)

SPECIAL = 256  # a token without text


def text_of(tokens: Sequence[int]) -> str:
    """Decode one byte per token."""
    return bytes(token for token in tokens if token != SPECIAL).decode(errors="replace")


def text_without_first_space(tokens: Sequence[int]) -> str:
    """Decode as SentencePiece does, without a space before the first token."""
    return text_of(tokens).removeprefix(" ")


def stops_after(tokens: Iterable[int], *stops: str, text_of: TextOf = text_of) -> int | None:
    """Return the number of tokens after which a generation stops."""
    automaton, read = StopStrings(stops), ReadText()
    for count, token in enumerate(tokens, 1):
        if has_stop_string(token, automaton, read, text_of):
            return count
    return None


def stops_at(text: str | bytes, *stops: str) -> int | None:
    """Return the number of bytes after which a generation stops."""
    return stops_after(text.encode() if isinstance(text, str) else text, *stops)


def test_generation_stops_with_the_last_byte_of_a_stop_string() -> None:
    assert stops_at("one two three", "two") == 7
    assert stops_at("one two three", "three", "two") == 7
    assert stops_at("one two three", "four") is None


@pytest.mark.parametrize("stop", ["é", "日本", "a😀b", "\n\n"])
def test_characters_of_several_bytes_count_once_complete(stop: str) -> None:
    before = "xyz é" if stop != "é" else "xyz e"

    assert stops_at(f"{before}{stop} and on", stop) == len(f"{before}{stop}".encode())


def test_invalid_bytes_neither_stop_nor_fail() -> None:
    assert stops_at(b"\xff\xfe\x80 end \xe2\x82", "end") == 7


def test_a_long_stop_string_is_found_late_in_a_long_text() -> None:
    stop = "</answer>" * 5

    assert stops_at("word " * 300 + stop + "more", stop) == 1500 + len(stop)


def test_tokens_without_text_do_not_hide_a_stop_string() -> None:
    assert stops_after([*b"st", *[SPECIAL] * 50, *b"op"], "stop") == 54


def test_a_space_dropped_before_the_first_token_counts() -> None:
    tokens = [*b"ab", *[SPECIAL] * 30, *b" c"]

    assert stops_after(tokens, "b c", text_of=text_without_first_space) == 34


def test_a_stop_string_is_found_after_many_invalid_bytes() -> None:
    noise = b"\x80" * 100

    assert stops_at(noise + "é end".encode(), "é end") == 106


def byte_fallback(tokens: Sequence[int]) -> str:
    """Decode one byte per token as SentencePiece's decoder does: all bytes of a row, or none."""
    try:
        return bytes(tokens).decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(tokens)


@given(st.lists(st.sampled_from([*"가나다🙂éa".encode(), 0xFF]), max_size=3), st.data())
def test_invalid_bytes_do_not_hide_the_next_character(noise: list[int], data: st.DataObject) -> None:
    before = data.draw(st.text("가é🙂a", max_size=4)).encode()
    tokens = [*before, *noise, *b"\xff", *"라마바".encode()]

    assert stops_after(tokens, "마", text_of=byte_fallback) == len(tokens) - len("바".encode())


@pytest.mark.parametrize(
    ("prompt", "end"), [(b"a b", b"b"), ("a가".encode(), "가".encode()), (b"\xff\xff", b""), (b"", b"")]
)
def test_a_text_continues_after_complete_characters_of_its_prompt(prompt: bytes, end: bytes) -> None:
    assert prompt_end(list(prompt), byte_fallback) == list(end)


def test_a_first_space_after_a_prompt_counts() -> None:
    automaton = StopStrings([" on"])
    read = ReadText(context=prompt_end([*b"Go"], text_without_first_space))

    stopped = [has_stop_string(token, automaton, read, text_without_first_space) for token in b" on"]

    assert stopped == [False, False, True]


@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=8), st.text("abc", max_size=60))
def test_the_automaton_finds_the_first_end_of_any_string(stops: list[str], text: str) -> None:
    ends = [at for at in range(1, len(text) + 1) if any(text[:at].endswith(stop) for stop in stops)]

    assert stops_at(text, *stops) == (ends[0] if ends else None)


def test_the_cost_of_a_token_does_not_depend_on_the_stop_strings() -> None:
    decoded: list[int] = []
    looked_up: list[int] = []

    def counting(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return text_of(tokens)

    class Counting(StopStrings):
        @override
        def _child(self, node: int, character: str) -> int | None:
            looked_up.append(node)
            return super()._child(node, character)

    stops = ["ab" * 30 + chr(200 + at) for at in range(64)]
    for many in (stops[:1], stops):
        automaton, read = Counting(many), ReadText()
        decoded.clear()
        looked_up.clear()
        for token in b"ab" * 500:
            assert not has_stop_string(token, automaton, read, counting)
        assert max(decoded) == 2
        assert len(looked_up) <= 2 * 1000


def test_the_decoding_of_invalid_bytes_is_bounded() -> None:
    decoded: list[int] = []

    def counting(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return text_of(tokens)

    assert stops_after(b"\x80" * 500, "stop", text_of=counting) is None
    assert max(decoded) <= 2 * MAX_PENDING + CHARACTER_TOKENS
