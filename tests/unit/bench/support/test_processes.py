"""Killed benchmarks, which leave no process behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.waiting import until

PROGRAM = """
import time
from pathlib import Path
from bench.support.processes import a_redis
with a_redis(Path({folder!r})) as (_, pid):
    print(pid, flush=True)
    time.sleep(600)
"""


async def test_a_killed_benchmark_leaves_no_redis_process(tmp_path: Path) -> None:
    program = PROGRAM.format(folder=str(tmp_path))
    with subprocess.Popen(  # noqa: ASYNC220  # it is started and killed, never waited for in between
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as bench:
        assert bench.stdout
        redis = Path(f"/proc/{int(bench.stdout.readline())}")
        command = (redis / "cmdline").read_bytes()
        assert b"redis-server" in command
        bench.kill()
    await until(lambda: not _runs(redis))


def _runs(process: Path) -> bool:
    try:
        return "Z" not in (process / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
