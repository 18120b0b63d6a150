"""Effect of a bad neighbour: waits of an ordinary tenant next to each of 27 bad ones, and alone.

    python -m bench neighbour [--neighbours long_pass,heavy_sampler,…] [--seconds 45] [--tenants 8]

Each neighbour gets a new `cotrain serve` on a small random model. Three probes use that server: a tenant that trains
256 tokens per step, one that samples 8 tokens, and a health check. Each makes one call after another. They run alone
first, then next to the neighbour, which is a process of its own. With `--tenants` it is several tenants, each a process
with its own key. All processes share this machine's cores, clients included.

* alone, beside: p50 and p99 of a probe's waits (s); a pending call counts with its age
* promised: limit of p99 (docs/develop/benchmarks.md), for training one clock period + 2 x alone, for sampling and health
  2 x alone + 1 s
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Self

import httpx

from bench.neighbours.attacks import ATTACKER_ADDRESS, ATTACKS
from bench.neighbours.tenants import TENANTS
from bench.support.model import add_tokenizer, build
from bench.support.processes import edge, tethered
from bench.support.record import Args, Choice, Options, Report, Some
from bench.support.serving import ADAM, cycles_of, random_data, serving
from bench.support.timing import percentile
from cotrain import ModelInput, SamplingParams, ServiceClient

NEIGHBOURS: dict[str, Callable[[str, str], Awaitable[None]]] = {**TENANTS, **ATTACKS}
PERIOD_S = 10.0
KEYS = ("tml-ordinary_trainer00", "tml-ordinary_sampler00")
NEIGHBOUR_KEY = "tml-neighbour_{:08}"
#: Seconds after the start of a neighbour that are not counted, because it creates its runs first.
SETTLING_S = 8.0
#: Tokens of a probe's sequences, and of a sample.
SEQUENCE_TOKENS, SAMPLE_TOKENS = 128, 8
#: Pause between two health checks in s, as of a load balancer; the other probes have no pause.
HEALTH_PAUSE_S = 0.1
OPTIONS: Options = {
    "neighbours": Some(tuple(NEIGHBOURS)),
    "seconds": (45.0, "beside each neighbour"), "alone_seconds": 15.0,
    "threads": (os.cpu_count() or 1, "of torch"),
    "tenants": (1, "of each neighbour, at once"),
    "step_tokens": (256, "of the tenant that trains; a child process parses its passes above 1,280"),
    "edge": (False, "put HAProxy in front, and send attacks from another address"),
    "be": (Choice(tuple(NEIGHBOURS)), "run this neighbour until it is killed, and measure nothing"),
    "address": (str, "URL of a server, for --be"), "key": (NEIGHBOUR_KEY.format(0), "API key, for --be"),
}  # fmt: skip


def run(args: Args, report: Report) -> None:
    if args.be:
        print("begun", flush=True)
        asyncio.run(NEIGHBOURS[args.be](args.address, args.key))  # type: ignore[arg-type]
        return
    with tempfile.TemporaryDirectory(prefix="cotrain-bench-") as scratch:
        model = add_tokenizer(build(Path(scratch) / "model"))
        rows = [row for name in args.neighbours for row in beside(name, args, model, Path(scratch) / name)]
    report["rows"] = rows
    print(f"{sum(row['kept'] for row in rows)} of {len(rows)} promises kept")


def beside(name: str, args: Args, model: Path, folder: Path) -> list[dict[str, Any]]:
    """Measure the probes alone, then next to one neighbour; return a row per probe."""
    keys = [NEIGHBOUR_KEY.format(number) for number in range(args.tenants)]
    log = folder.with_suffix(".log")
    with contextlib.ExitStack() as stack:
        direct = address = stack.enter_context(serving(model, folder, [*KEYS, *keys], args.threads))[0]
        if args.edge:
            address = stack.enter_context(edge(address))
        probes = [stack.enter_context(probe) for probe in ordinary(address, args.step_tokens, stack)]
        alone = watched(probes, args.alone_seconds)
        errors = stack.enter_context(log.open("w"))
        with contextlib.ExitStack() as neighbours:
            started = [
                neighbours.enter_context(neighbour(name, address, key, errors, is_elsewhere=args.edge)) for key in keys
            ]
            for process in started:
                assert process.stdout is not None
                process.stdout.readline()  # it has begun or ended
            time.sleep(SETTLING_S)
            watched(probes, 0.0)
            found = watched(probes, args.seconds)
            ended = next((status for each in started if (status := each.poll()) is not None), None)
        longest_s = 0.0
        with contextlib.suppress(httpx.HTTPError):  # a server that does not respond has no records
            longest_s = max((each["duration_ms"] / 1000 for each in cycles_of(direct)), default=0.0)
    shared = {"neighbour": name, "tenants": args.tenants, "longest_cycle_s": longest_s, "neighbour_ended": ended}
    rows = [{**shared, "probe": each.name, **judged(each.name, alone, found)} for each in probes]
    for row in rows:
        show(row)
    print(f"   longest cycle {longest_s:.1f} s", flush=True)
    if ended is not None:
        last = (log.read_text().strip().splitlines() or [""])[-1]
        print(f"   the neighbour ended on its own ({ended}): {last}")
    return rows


@contextlib.contextmanager
def neighbour(
    name: str, address: str, key: str, errors: IO[str], *, is_elsewhere: bool
) -> Iterator[subprocess.Popen[str]]:
    """Run a neighbour until the end of the context; yield its process."""
    command = [sys.executable, "-m", "bench", "neighbour", "--be", name, "--address", address, "--key", key]
    environment = os.environ | ({ATTACKER_ADDRESS: "127.0.0.2"} if is_elsewhere else {})
    process = subprocess.Popen(
        tethered(command), stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Probe:
    """Repeats one call in a thread of its own and records its durations.

    A pending call counts with its age when the waits are read. A hanging probe therefore differs from one that was
    never used.
    """

    def __init__(self, name: str, act: Callable[[], object], pause_s: float = 0.0) -> None:
        self.name, self._act, self._pause_s = name, act, pause_s
        self._lock = threading.Lock()
        self._waits: list[float] = []
        self._failures: list[str] = []
        self._began: float | None = None
        self._leaving = threading.Event()

    def __enter__(self) -> Self:
        self._act()  # warm-up: creates everything that is created on first use
        threading.Thread(target=self._repeat, daemon=True, name=self.name).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()

    def take(self) -> tuple[list[float], list[str]]:
        """Return the waits (s) and the failures since the last call."""
        with self._lock:
            waits, self._waits = self._waits, []
            failures, self._failures = self._failures, []
            if self._began is not None and (not waits or time.monotonic() - self._began > 1.0):
                waits.append(time.monotonic() - self._began)
        return waits, failures

    def _repeat(self) -> None:
        while not self._leaving.is_set():
            self._began = time.monotonic()
            try:
                self._act()
            except Exception as error:  # noqa: BLE001 - it is recorded and shown
                with self._lock:
                    self._failures.append(f"{type(error).__name__}: {error}"[:200])
                self._leaving.wait(1.0)
            with self._lock:
                self._waits.append(time.monotonic() - self._began)
                self._began = None
            self._leaving.wait(self._pause_s)


def ordinary(address: str, step_tokens: int, stack: contextlib.ExitStack) -> list[Probe]:
    """Return the probes: a tenant that trains, one that samples from an adapter, and a health check."""
    services = [stack.enter_context(ServiceClient(base_url=address, api_key=key)) for key in KEYS]
    trainer, other = (each.create_lora_training_client("bench", rank=8, seed=at) for at, each in enumerate(services))
    data = random_data(step_tokens // SEQUENCE_TOKENS, SEQUENCE_TOKENS, seed=0)
    sampler = other.save_weights_and_get_sampling_client()
    prompt = ModelInput.from_ints(list(range(1, 17)))
    params = SamplingParams(max_tokens=SAMPLE_TOKENS, seed=0, stop=[])

    def train() -> object:
        passed = trainer.forward_backward(data, "cross_entropy")
        stepped = trainer.optim_step(ADAM)
        return passed.result(), stepped.result()

    return [
        Probe("training", train),
        Probe("sampling", lambda: sampler.sample(prompt, 1, params).result()),
        # On a new connection, like a load balancer.
        Probe("healthz", lambda: httpx.get(f"{address}/healthz", timeout=120.0).raise_for_status(), HEALTH_PAUSE_S),
    ]


def watched(probes: Sequence[Probe], seconds: float) -> dict[str, dict[str, Any]]:
    """Return the results of each probe within this time."""
    for probe in probes:
        probe.take()
    time.sleep(seconds)
    found = {}
    for probe in probes:
        waits, failures = probe.take()
        found[probe.name] = {
            "count": len(waits), "p50_s": percentile(waits, 0.5, math.inf), "p99_s": percentile(waits, 0.99, math.inf),
            "failures": len(failures), "first_failure": failures[:1],
        }  # fmt: skip
    return found


def judged(probe: str, alone: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
    """Return a probe's waits with and without a neighbour, and the verdict on the promised limit."""
    before, after = alone[probe], beside[probe]
    promised = 2 * before["p99_s"] + (PERIOD_S if probe == "training" else 1.0)
    return {
        "alone": before, "beside": after, "promised_p99_s": promised, "p99_over_alone": after["p99_s"] / before["p99_s"],
        "kept": after["p99_s"] <= promised and not after["failures"],
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    alone, found = row["alone"], row["beside"]
    print(
        f"{row['neighbour']:<18} {row['probe']:<9} alone p50 {alone['p50_s']:6.3f} p99 {alone['p99_s']:6.3f}"
        f"   beside p50 {found['p50_s']:7.3f} p99 {found['p99_s']:7.3f} ({found['count']},"
        f" {found['failures']} failed)   promised {row['promised_p99_s']:6.2f}"
        f"   {'kept' if row['kept'] else 'BROKEN'} {' '.join(found['first_failure'])}",
        flush=True,
    )
