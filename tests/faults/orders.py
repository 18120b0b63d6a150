"""Client of the nursery process (`tests.faults.nursery`): its orders and its reports."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from typing_extensions import override

from tests.warm.popen import Popen
from tests.warm.sources import ROOT, SOURCES


@dataclass
class Tally:
    """Statistics of the trials of one nursery."""

    trials: int = 0
    deaths: Counter[str] = field(default_factory=Counter)
    violations: int = 0

    def add(self, deaths: Counter[str], violations: Sequence[str]) -> None:
        """Count one trial."""
        self.trials += 1
        self.deaths += deaths
        self.violations += len(violations)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.trials + other.trials, self.deaths + other.deaths,
            self.violations + other.violations,
        )  # fmt: skip

    @override
    def __str__(self) -> str:
        by_name = ", ".join(f"{name} {count}" for name, count in sorted(self.deaths.items()))
        return (
            f"{self.trials} trials, {self.deaths.total()} deaths of processes ({by_name or 'none'}), "
            f"{self.violations} violations"
        )


class Nursery:
    """Handle of the process that is the parent of all processes of a server."""

    def __init__(self, model: Path, sources: Sequence[str] = SOURCES, micro_batch_tokens: str = "auto") -> None:
        self.model = model
        self._micro_batch_tokens = micro_batch_tokens
        self._sources = sources
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._ended: dict[int, asyncio.Future[int]] = {}
        self._order = asyncio.Lock()
        self.tally = Tally()

    async def __aenter__(self) -> Self:
        paths = os.pathsep.join([*self._sources, str(ROOT)])
        environment = {
            **os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        command = ["tests.faults.nursery", str(self.model), self._micro_batch_tokens]
        self._process = Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment,
        )  # fmt: skip
        assert self._process.stdout
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
        )
        self._reading = asyncio.create_task(self._read(reader))
        assert await self._answers.get() == "ready"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        await self._reading
        self._process.wait()

    async def ask(self, do: str, **order: Any) -> Any:
        """Send an order and wait for its answer.

        A cancelled caller leaves no answer to the next one.
        """
        return await asyncio.shield(asyncio.create_task(self._ask(do, order)))

    def tell(self, do: str, **order: Any) -> None:
        """Send an order without an answer."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"do": do, **order}).encode() + b"\n")

    def ended(self, pid: int) -> asyncio.Future[int]:
        """Return a future of the exit status of a child."""
        return self._ended.setdefault(pid, asyncio.get_running_loop().create_future())

    async def _ask(self, do: str, order: Mapping[str, Any]) -> Any:
        async with self._order:
            self.tell(do, **order)
            return await self._answers.get()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            told = json.loads(line)
            if "ended" in told:
                self.ended(told["ended"]).set_result(told["status"])
            else:
                self._answers.put_nowait(told["answer"])
        self._answers.put_nowait("gone")
