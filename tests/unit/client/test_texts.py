"""Text as it streams from a server: whole, failing in the middle, ended by the user."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import httpx
import pytest

from cotrain.commands import sample
from cotrain.commands.sample import TextRequest, stream
from cotrain.errors import BadRequestError, InternalServerError, MalformedMessage

ASKED = TextRequest("m")
ONE = b'data: {"choices": [{"text": "one"}]}\n\n'


def serving(*events: bytes, status: int = 200) -> httpx.Client:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, content=b"".join(events))

    return httpx.Client(transport=httpx.MockTransport(answer), base_url="http://server")


def test_parts_of_either_shape_are_given_and_what_keeps_a_line_open_is_not() -> None:
    chat = b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
    part = 'data: {"choices": [{"delta": {"content": "zwölf"}}]}\n\n'.encode()
    usage = b'data: {"choices": []}\n\n'
    done = b"data: [DONE]\n\n"
    with serving(ONE, b": still working\n\n", chat, part, usage, done) as http:
        assert "".join(stream(http, "x", ASKED)) == "onezwölf"


def test_a_failure_in_the_middle_comes_after_what_came() -> None:
    came: list[str] = []
    with (
        serving(ONE, b'data: {"error": {"message": "The worker died."}}\n\n') as http,
        pytest.raises(InternalServerError, match=r"^500: The worker died\.$"),
    ):
        came.extend(stream(http, "x", ASKED))
    assert came == ["one"]


def test_a_refusal_is_read_in_the_dialect_it_is_written_in() -> None:
    with (
        serving(b'{"error": {"message": "seed: too large", "code": "x"}}', status=400) as http,
        pytest.raises(BadRequestError, match=r"^400: seed: too large$"),
    ):
        list(stream(http, "x", ASKED))


def test_what_is_no_json_is_named() -> None:
    with serving(b"data: <html>\n\n") as http, pytest.raises(MalformedMessage):
        list(stream(http, "x", ASKED))


def test_an_answer_that_the_user_ends_is_kept_as_far_as_it_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def parts(*_: object) -> Iterator[str]:
        yield "as far"
        raise KeyboardInterrupt

    monkeypatch.setattr(sample, "stream", parts)
    with serving() as http:
        assert sample._answer(http, [], ASKED) == "as far"
    assert capsys.readouterr().out == "as far\n"


def test_a_model_cannot_play_with_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sample._show("\x1b[2Ja\tb\n")
    assert capsys.readouterr().out == "\x1b[2Ja\tb\n"  # a file gets it as it is
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    sample._show("\x1b[2Ja\tb\n")
    assert capsys.readouterr().out == "\N{REPLACEMENT CHARACTER}[2Ja\tb\n"
