from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from cotrain.errors import APIConnectionError, NotFoundError, PermissionDeniedError
from cotrain.transport.http import Transport
from cotrain.transport.responses import RetryPolicy
from tests.support.fake_api import Answer, refusal

CONTENT = bytes(range(256)) * 20_000
URL = "https://files.example/secret/weights"


@dataclass
class Files:
    """Server of one file with ranges, which breaks off where a test says."""

    content: bytes = CONTENT
    etag: str = '"v1"'
    breaks: list[int] = field(default_factory=list)
    """Number of bytes after which the next answers break off."""
    answers: list[Answer] = field(default_factory=list)
    asked: list[httpx.Request] = field(default_factory=list)

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        if self.answers:
            prepared = self.answers.pop(0)
            if isinstance(prepared, Exception):
                raise prepared
            return prepared
        first = self._first(request)
        if first > len(self.content):
            return httpx.Response(416)
        rest = self.content[first:]
        headers = {"Content-Length": str(len(rest)), "ETag": self.etag}
        return httpx.Response(206 if first else 200, headers=headers, content=self._sent(rest))

    def _first(self, request: httpx.Request) -> int:
        wanted = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
        holds = request.headers.get("If-Range") == self.etag
        return int(wanted[1]) if wanted and holds else 0

    async def _sent(self, rest: bytes) -> AsyncIterator[bytes]:
        if not self.breaks:
            yield rest
            return
        yield rest[: self.breaks.pop(0)]
        raise httpx.ReadError("cut")


def fetch(files: Files, target: Path, policy: RetryPolicy | None = None) -> list[tuple[int, int]]:
    reported: list[tuple[int, int]] = []

    async def at_once(_: float) -> None:
        return None

    async def run() -> None:
        transport = Transport(
            "https://files.example", "tml-key", network=httpx.MockTransport(files.answer), policy=policy, sleep=at_once
        )
        try:
            await transport.fetch(URL, target, lambda *now: reported.append(now))
        finally:
            await transport.close()

    asyncio.run(run())
    return reported


def ranges(files: Files) -> list[str | None]:
    return [request.headers.get("Range") for request in files.asked]


NEVER_AGAIN = RetryPolicy(give_up_after_s=-1.0)


def test_a_broken_download_is_resumed(tmp_path: Path) -> None:
    files = Files(breaks=[1_000, 2_000])
    reported = fetch(files, tmp_path / "weights")
    assert (tmp_path / "weights").read_bytes() == CONTENT
    assert ranges(files) == [None, "bytes=1000-", "bytes=3000-"]
    assert reported[-1] == (len(CONTENT), len(CONTENT))
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    assert not any("x-api-key" in request.headers for request in files.asked)


def test_a_later_process_resumes_a_partial_download(tmp_path: Path) -> None:
    files = Files(breaks=[1_000])
    with pytest.raises(APIConnectionError, match="weights broke off"):
        fetch(files, tmp_path / "weights", NEVER_AGAIN)
    assert not (tmp_path / "weights").exists()
    reported = fetch(files, tmp_path / "weights")
    assert ranges(files) == [None, "bytes=1000-"]
    assert (tmp_path / "weights").read_bytes() == CONTENT
    assert reported[0][0] > 1_000


def test_a_partial_download_of_another_file_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(APIConnectionError):
        fetch(Files(content=b"old" * 9_000, breaks=[1_000]), tmp_path / "weights", NEVER_AGAIN)
    fetch(Files(etag='"v2"'), tmp_path / "weights")
    assert (tmp_path / "weights").read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_a_partial_download_without_a_strong_etag_is_restarted(tmp_path: Path) -> None:
    files = Files(etag='W/"v1"', breaks=[1_000])
    fetch(files, tmp_path / "weights")
    assert ranges(files) == [None, None]
    assert (tmp_path / "weights").read_bytes() == CONTENT


def test_a_partial_download_longer_than_the_file_is_restarted(tmp_path: Path) -> None:
    (tmp_path / ".weights~v1.part").write_bytes(b"x" * (len(CONTENT) + 1))
    files = Files()
    fetch(files, tmp_path / "weights")
    assert ranges(files) == [f"bytes={len(CONTENT) + 1}-", None]
    assert (tmp_path / "weights").read_bytes() == CONTENT


def test_a_file_of_the_wrong_size_is_an_error(tmp_path: Path) -> None:
    short = httpx.Response(200, headers={"Content-Length": "9"}, content=b"12345")
    with pytest.raises(APIConnectionError, match="5 bytes instead of 9"):
        fetch(Files(answers=[short]), tmp_path / "weights", NEVER_AGAIN)
    assert not any(tmp_path.iterdir())


def test_partial_downloads_of_other_files_are_kept(tmp_path: Path) -> None:
    neighbour = tmp_path / ".weights.age~v1.part"
    neighbour.write_bytes(b"x")
    fetch(Files(), tmp_path / "weights")
    assert neighbour.read_bytes() == b"x"


@pytest.mark.parametrize(("status", "error"), [(403, PermissionDeniedError), (404, NotFoundError)])
def test_an_expired_link_keeps_the_received_part(tmp_path: Path, status: int, error: type[Exception]) -> None:
    files = Files(breaks=[1_000])
    with pytest.raises(APIConnectionError):
        fetch(files, tmp_path / "weights", NEVER_AGAIN)
    files.answers = [refusal(status)]
    with pytest.raises(error):
        fetch(files, tmp_path / "weights")
    fetch(files, tmp_path / "weights")
    assert ranges(files)[-1] == "bytes=1000-"


def test_a_temporarily_unreachable_server_is_retried(tmp_path: Path) -> None:
    fetch(Files(answers=[httpx.ConnectError("refused"), refusal(503)]), tmp_path / "weights")
    assert (tmp_path / "weights").read_bytes() == CONTENT
