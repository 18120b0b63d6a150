"""Real Redis for tests: the embedded one, on a unix socket in a temporary folder."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from cotrain_store.disk.embedded_redis import find_redis_binary, redis_command


class EmbeddedRedis:
    """Redis process. `kill` is SIGKILL, `restart` starts it again on the same data."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="cotrain-redis-")
        self.socket = Path(self._folder.name) / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._process = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
        self._folder.cleanup()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stand_still(self) -> None:
        """Suspend it: it accepts connections and answers none, until `kill` or `go_on`."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        self._process = self._start()

    def flush(self) -> None:
        answer = self._ask("FLUSHALL")
        assert answer == ["+OK"], answer

    def settings(self) -> dict[str, str]:
        _, *strings = self._ask("CONFIG GET *")  # a length precedes each string
        return dict(zip(strings[1::4], strings[3::4], strict=True))

    def put_back(self, settings: dict[str, str]) -> dict[str, str]:
        """Restore the settings. Return those that had changed."""
        left = {name: now for name, now in self.settings().items() if now != settings.get(name)}
        with redis.Redis.from_url(self.url) as connection:
            for name in left:
                connection.config_set(name, settings[name])
        return left

    def _ask(self, command: str) -> list[str]:
        """Return the lines of an answer. Clients of redis-py take milliseconds before each test."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.socket))
            connection.sendall(f"{command}\r\nQUIT\r\n".encode())
            with connection.makefile(newline="\r\n") as answer:
                return answer.read().split("\r\n")[:-2]

    def _start(self) -> subprocess.Popen[bytes]:
        command = redis_command(find_redis_binary(), Path(self._folder.name), self.socket)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(redis.ConnectionError):
                with redis.Redis.from_url(self.url) as connection:
                    connection.ping()
                return process
            time.sleep(0.01)
        raise RuntimeError("the embedded Redis did not come up")
