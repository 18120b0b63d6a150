"""Text streamed from a server: complete, failing in the middle, interrupted by the user."""

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


def test_text_parts_are_yielded_and_keep_alive_lines_are_not() -> None:
    chat = b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
    part = 'data: {"choices": [{"delta": {"content": "zwölf"}}]}\n\n'.encode()
    usage = b'data: {"choices": []}\n\n'
    done = b"data: [DONE]\n\n"
    with serving(ONE, b": still working\n\n", chat, part, usage, done) as http:
        assert "".join(stream(http, "x", ASKED)) == "onezwölf"


def test_a_failure_in_the_middle_is_raised_after_the_earlier_parts() -> None:
    came: list[str] = []
    with (
        serving(ONE, b'data: {"error": {"message": "The worker died."}}\n\n') as http,
        pytest.raises(InternalServerError, match=r"^500: The worker died\.$"),
    ):
        came.extend(stream(http, "x", ASKED))
    assert came == ["one"]


def test_a_refusal_is_read_in_the_format_of_its_api() -> None:
    with (
        serving(b'{"error": {"message": "seed: too large", "code": "x"}}', status=400) as http,
        pytest.raises(BadRequestError, match=r"^400: seed: too large$"),
    ):
        list(stream(http, "x", ASKED))


def test_an_answer_that_is_not_json_is_reported() -> None:
    with serving(b"data: <html>\n\n") as http, pytest.raises(MalformedMessage):
        list(stream(http, "x", ASKED))


def test_an_answer_interrupted_by_the_user_keeps_its_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def parts(*_: object) -> Iterator[str]:
        yield "as far"
        raise KeyboardInterrupt

    monkeypatch.setattr(sample, "stream", parts)
    with serving() as http:
        assert sample._answer(http, [], ASKED) == "as far"
    assert capsys.readouterr().out == "as far\n"


def test_control_characters_of_a_model_are_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sample._show("\x1b[2Ja\tb\n")
    assert capsys.readouterr().out == "\x1b[2Ja\tb\n"  # a file gets it unchanged
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    sample._show("\x1b[2Ja\tb\n")
    assert capsys.readouterr().out == "\N{REPLACEMENT CHARACTER}[2Ja\tb\n"
