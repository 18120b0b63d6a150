"""Call path of one forward_backward: the files that it enters, and its returns to files that it had left.

    python -m bench walk [--list]

All four roles run in this process, with a real Redis and a tiny model: our client, the API behind a real socket, the
scheduler's clock and a worker. A first pass warms caches. The second one is recorded, call by call, from
`forward_backward()` to its result. Of the worker only its step is recorded, from restoring to commit, because its
maintenance between steps is not part of the path.

A *move* is a call into another file than the last call of the same thread; the same move counts once, as a loop is
read once. A *return* is a move into a file that this thread had entered before. API and scheduler share a thread, and
are distinguished by their tasks.

Left out are frames that resume after an await, and periodic tasks beside the path (BESIDE). So are files of the worker
that run once per layer or per key (KERNELS).
"""

from __future__ import annotations

import asyncio
import contextlib
import dis
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from bench.support.record import Args, Options, Report
from bench.support.serving import datum
from cotrain import ServiceClient
from cotrain_server.app import create_app
from cotrain_server.settings import ServerSettings
from tests.support.ports import free_port
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import Home, make_worker, pool_record_for_tests, stack
from tests.support.tiny_models import build_tiny_qwen3
from tests.support.waiting import until

ROOT = f"{Path(__file__).parents[1]}/"
PACKAGES = ("client", "scheduler", "server", "workers")
STEP = "WorkerLoop.execute"
KEY = "tml-walk_secret-of-the-walk"
KERNELS = re.compile(r"engine/(model|lora|routing|sequence_table|device)|redis_keys|messages/(ids|encoding)|failpoints")
#: Functions of periodic tasks that serve no single request.
BESIDE = {"Scheduler._drive.<locals>.scale", "Delivery.run", "repeat", "Scheduler._keep_lead"}
RESUME = dis.opmap["RESUME"]
OPTIONS: Options = {"list": (False, "name the files, in the order of entry")}


def run(args: Args, _: Report) -> None:
    recorder = Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    with tempfile.TemporaryDirectory(prefix="cotrain-walk-") as folder, EmbeddedRedis() as redis:
        asyncio.run(walk(Path(folder), redis.url, recorder))
    sys.setprofile(None)
    threading.setprofile(None)
    entered = {call for calls in recorder.calls.values() for call in calls}
    files = Counter(path.split("/")[0] for path in {path for path, _ in entered})
    print(f"entered: {sum(files.values())} files, {len(entered)} functions", dict(files))
    for thread, calls in sorted(recorder.calls.items()):
        walked = [call for call in calls if thread != "worker" or not KERNELS.search(call[0])]
        pairs = zip([("", ""), *walked], walked, strict=False)
        moves = dict.fromkeys((before, after) for before, after in pairs if before[0] != after[0])
        seen = dict.fromkeys(after[0] for _, after in moves)
        print(f"{thread}: {len(seen)} files, {len(moves)} moves, {len(moves) - len(seen)} returns")
        if args.list:
            print("   ", "\n    ".join(seen))


class Recorder:
    """Profiler that records each call into our files, by thread."""

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[str, str]]] = {}
        self.is_on = self.in_step = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.is_on:
            return
        code = frame.f_code
        if event in {"call", "return"} and code.co_qualname == STEP:
            self.in_step = event == "call"
        thread = threading.current_thread().name
        if event != "call" or thread == "heartbeat" or (thread == "worker" and not self.in_step):
            return
        is_resumed = code.co_code[frame.f_lasti] == RESUME and code.co_code[frame.f_lasti + 1] != 0
        own = code.co_filename.removeprefix(ROOT)
        if not is_resumed and own.startswith(PACKAGES) and not is_beside(frame):
            self.calls.setdefault(walker(), []).append((own, code.co_qualname))


def is_beside(frame: FrameType | None) -> bool:
    while frame:
        if frame.f_code.co_qualname in BESIDE:
            return True
        frame = frame.f_back
    return False


def walker() -> str:
    """Return the name of the current thread, or in the main thread the role that owns the current task."""
    name = threading.current_thread().name
    if name != "MainThread":
        return name
    with contextlib.suppress(RuntimeError):  # no event loop is running
        task = asyncio.current_task()
        code = getattr(task and task.get_coro(), "cr_code", None)
        if code and "cotrain_scheduler" in code.co_filename:
            return "scheduler"
    return "api"


async def walk(folder: Path, url: str, recorder: Recorder) -> None:
    """Start all roles and record the second of two passes."""
    from cotrain_workers.engine.engine import Engine

    engine = Engine.load(str(build_tiny_qwen3(folder / "model")))
    port = free_port()
    settings = ServerSettings.model_validate({"redis_url": url, "data_dir": folder, "port": port, "api_keys": [KEY]})
    api = uvicorn.Server(uvicorn.Config(create_app(settings), port=port, log_config=None))
    loop, opened = make_worker(Home(url, folder), engine)
    working = threading.Thread(target=loop.run, name="worker")
    async with stack(url, folder):
        serving = asyncio.create_task(api.serve())
        working.start()
        await until(lambda: api.started)
        await asyncio.to_thread(two_passes, f"http://127.0.0.1:{port}", recorder)
        api.should_exit = True
        await serving
    loop.stop()
    working.join()
    opened.close()


def two_passes(url: str, recorder: Recorder) -> None:
    client = ServiceClient(base_url=url, api_key=KEY)
    run = client.create_lora_training_client(base_model=pool_record_for_tests().base_model, rank=4)
    data = [datum([1, 2, 3, 4, 5])]
    run.forward_backward(data, "cross_entropy").result()
    time.sleep(1.0)  # pending writes of the first pass complete
    recorder.is_on = True
    run.forward_backward(data, "cross_entropy").result()
    recorder.is_on = False
