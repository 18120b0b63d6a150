"""Invariants after a crash, checked from outside: Redis, files, answers, exit codes.

* I1: Every accepted request resolves.
* I2: It resolves once, and every read returns the same bytes.
* I3: The runs end bit-identical to undisturbed ones, and their training is counted once.
* I4: snap ≤ done < next, an idle server has no planned op, and no op has a result before its
  commit.
* I5: The log reaches back to its snapshots, the files it refers to exist, every counter matches its
  objects, and there are no unreferenced files (`leftovers`).
* I6: Epochs, `done` and `snap` only grow, and a replaced worker commits nothing (`accepted_from_replaced`).
* I7: Queues of an idle server count 0.
* I8: Processes end only by SIGKILL or in an orderly way.
* I9: Tenants with pending work receive equal turns (`fairness.py`).
* I10: AOF and spool stay small.

The client checks I1 and I2 (`traffic.py`): it waits for every answer, and reads each twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis as redis_client
from safetensors.numpy import load

from cotrain_store import redis_keys
from cotrain_store.disk.spool import SpoolRef
from cotrain_store.messages.ids import PoolId, RunId, WorkerId, request_id, seq_of
from cotrain_store.messages.ops import OpKind, QueuedOp
from cotrain_store.redis_client.connection import SyncConnection
from cotrain_store.settings import pool_of
from tests.faults.fairness import Cycle, cycles_of
from tests.faults.host import Death
from tests.faults.traffic import Played

#: Maximum bytes of Redis' log and of the spool in a trial.
DISK_BOUND = 96 * 1024**2
#: Ops that do not change the state.
STATELESS = (OpKind.FORWARD, OpKind.SAVE, OpKind.REJECTED)
WATCH_S = 0.05


@dataclass(frozen=True)
class Ending:
    """Final state of a trial, without the parts that may differ between two trials; one entry per
    run, in order."""

    answers: Sequence[Mapping[str, Any]]
    states: Sequence[Mapping[str, str]]
    """Digest of weights, gradients, m and v each; spec, step, and the seq of the state."""
    weights: Sequence[Mapping[str, tuple[str, str]]]
    """Digests of the files of each save: adapter, optimizer state."""
    counted: Mapping[str, float]
    """Training of the pool and of all tenants; work that is repeated after a crash counts once."""


class PageRequest:
    """Store and files of an idle server: every process but Redis is stopped."""

    def __init__(self, store: SyncConnection, folder: Path, base_model: str) -> None:
        self._store = store
        self._folder = folder
        self._pool = pool_of(base_model)

    def ending(self, played: Sequence[Played]) -> Ending:
        """Return the ending of the runs."""
        runs = [RunId(one.run) for one in played]
        return Ending(
            [one.answers for one in played],
            [self._state(run) for run in runs],
            [self._weights(run) for run in runs],
            self._counted(),
        )

    def _counted(self) -> dict[str, float]:
        totals = self._store.hgetall(redis_keys.counters(self._pool))
        names = ("tokens", "optim_steps", "resolved_ops", "failed_ops")
        counted = {name: float(totals.get(name.encode(), 0)) for name in names}
        used = [
            float(amount)
            for name in self._store.scan_iter("cotrain:usage:*", SCAN_COUNT)
            for what, amount in self._store.hgetall(name).items()
            if what.startswith(b"training_tokens|")
        ]
        return counted | {"training_tokens": sum(used)}

    def violations(self) -> list[str]:
        """Check I4, I5, I7 and I10."""
        prefix = len(redis_keys.log(self._pool, RunId("")))
        names = self._store.scan_iter(f"{redis_keys.log(self._pool, RunId(''))}*", SCAN_COUNT)
        runs = sorted(RunId(name.decode()[prefix:]) for name in names)
        found = [said for run in runs for said in self._wrong_log(run)]
        return [*found, *self._wrong_refs(runs), *self._not_at_rest(), *self._too_much()]

    def leftovers(self) -> list[str]:
        """List unreferenced files (I5). Some exist until they are old enough to be swept."""
        return leftovers(self._folder, self._store, self._pool)

    def cycles(self) -> list[Cycle]:
        """Read the cycle records of the pool."""
        return cycles_of(self._store, self._pool)

    def _row(self, run: RunId) -> dict[str, str]:
        raw = self._store.hgetall(redis_keys.log(self._pool, run))
        return {name.decode(): value.decode() for name, value in raw.items()}

    def _ops(self, run: RunId) -> dict[int, QueuedOp]:
        raw = self._store.hgetall(redis_keys.ops(self._pool, run))
        return {int(seq): QueuedOp.parse(run, int(seq), text.decode()) for seq, text in raw.items()}

    def _wrong_log(self, run: RunId) -> Iterable[str]:
        row, ops = self._row(run), self._ops(run)
        snap, done, after = (int(row[name]) for name in ("snap", "done", "next"))
        if not snap <= done < after:
            yield f"I4 {run}: snap {snap}, done {done}, next {after}"
        oldest = int(row.get("oldsnap", -1))
        if any(seq <= oldest for seq in ops):
            yield f"I5 {run}: ops {sorted(ops)} reach back past snapshot {oldest}"
        if any(seq not in ops for seq in range(snap + 1, after)):
            yield f"I5 {run}: ops {sorted(ops)} do not cover {snap + 1}..{after - 1}"
        for file, sha256 in ((row.get("snapfile"), row.get("snapsha")), (row.get("oldfile"), row.get("oldsha"))):
            path = self._folder / "snapshots" / (file or "")
            if file and (not path.exists() or _sha256(path) != sha256):
                yield f"I5 {run}: snapshot {file} is not what was registered"
        for seq, op in ops.items():
            if _refers(op, done) and not self._is_whole(op.ref):
                yield f"I5 {run}: the body of seq {seq} is gone from {op.ref}"
            inline = self._store.hexists(redis_keys.bodies(self._pool, run), str(seq))
            if op.ref == "inline" and not inline and op.kind not in STATELESS:
                yield f"I5 {run}: the body of seq {seq} is gone"

    def _wrong_refs(self, runs: Sequence[RunId]) -> Iterable[str]:
        counted = Counter(
            SpoolRef.parse(op.ref).segment
            for run in runs
            for op in self._ops(run).values()
            if _refers(op, int(self._row(run)["done"]))
        )
        raw = self._store.hgetall(redis_keys.spool_segment_refs())
        noted = {segment.decode(): int(count) for segment, count in raw.items()}
        if noted != dict(counted):
            yield f"I5 spool references: noted {noted}, there are {dict(counted)}"

    def _not_at_rest(self) -> Iterable[str]:
        workers = [WorkerId(name.decode()) for name in self._store.smembers(redis_keys.workers(self._pool))]
        for worker in workers:
            for name in (
                redis_keys.open_steps(self._pool, worker), redis_keys.unstored_weights(self._pool, worker),
                redis_keys.claimed_samples(self._pool, worker),
            ):  # fmt: skip
                if self._store.exists(name):
                    yield f"I4 {name} is not empty at rest"
        for pattern in ("queue:*", "samples:*"):
            for name in self._store.scan_iter(f"{redis_keys.prefix(self._pool)}{pattern}", SCAN_COUNT):
                counts = {k.decode(): v.decode() for k, v in self._store.hgetall(name).items()}
                if any(float(count) for count in counts.values()):
                    yield f"I7 {name.decode()} is {counts} at rest"

    def _too_much(self) -> Iterable[str]:
        files = [f for part in ("redis", "spool") for f in (self._folder / part).glob("*")]
        size = sum(file.stat().st_size for file in files)
        if size > DISK_BOUND:
            yield f"I10 AOF and spool take {size} bytes"

    def _state(self, run: RunId) -> Mapping[str, str]:
        """Read the last snapshot, which a drain writes. Report it if it is stale."""
        row, ops = self._row(run), self._ops(run)
        snap, done = int(row["snap"]), int(row["done"])
        late = [s for s in range(snap + 1, done + 1) if s not in ops or ops[s].kind not in STATELESS]
        if late or not row.get("snapfile"):
            return {"undrained": f"{run}: snap {snap}, done {done}"}
        content = (self._folder / "snapshots" / row["snapfile"]).read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])["__metadata__"]
        kept = {name: header[name] for name in ("seq", "spec", "step", "grads_pending")}
        tensors = load(content)
        return kept | {name: hashlib.sha256(t.tobytes()).hexdigest() for name, t in tensors.items()}

    def _weights(self, run: RunId) -> Mapping[str, tuple[str, str]]:
        prefix = f"cotrain:weights:{run}:"
        found = {}
        for name in sorted(self._store.scan_iter(f"{prefix}*", SCAN_COUNT)):
            if self._store.type(name) != b"hash":
                continue
            digest, optimizer = ((value or b"").decode() for value in self._store.hmget(name, ["digest", "optimizer"]))
            is_there = (self._folder / "weights" / digest[:2] / digest).is_dir()
            found[name.decode().removeprefix(prefix)] = (digest if is_there else "gone", optimizer)
        return found

    def _is_whole(self, ref: str) -> bool:
        at = SpoolRef.parse(ref)
        path = self._folder / "spool" / at.segment
        if not path.exists():
            return False
        with path.open("rb") as file:
            file.seek(at.offset + 28)  # skip magic, length and digest
            return hashlib.sha256(file.read(at.length)).hexdigest()[:32] == at.digest


def differences(expected: Ending, got: Ending) -> list[str]:
    """Compare two endings (I2, I3). Return an empty list if they are bit-identical."""
    found = []
    if expected.counted != got.counted:
        found.append(f"I3 counted {got.counted}, and not {expected.counted}")
    for number, (asked, told) in enumerate(zip(expected.answers, got.answers, strict=True)):
        for request in sorted(asked.keys() | told.keys()):
            if asked.get(request) != told.get(request):
                what = f"{asked.get(request)!s:.200} became {told.get(request)!s:.200}"
                found.append(f"I3 run {number}: {request}: {what}")
    for what in ("states", "weights"):
        for number, (one, other) in enumerate(zip(getattr(expected, what), getattr(got, what), strict=True)):
            if one != other:
                differing = {
                    k: (one.get(k), other.get(k)) for k in one.keys() | other.keys() if one.get(k) != other.get(k)
                }
                found.append(f"I3 run {number}: {what} differ: {differing!s:.600}")
    return found


def unexpected(deaths: Iterable[Death]) -> list[str]:
    """List processes that crashed (I8)."""
    return [f"I8 {d.name} ended with {d.status} after {d.lived_s:.1f} s" for d in deaths if d.is_fault]


class Watch:
    """Watcher that checks during the faults that values only grow (I6) and that commits precede
    results (I4)."""

    def __init__(self, url: str, base_model: str) -> None:
        self._url = url
        self._pool = pool_of(base_model)
        self._seen: dict[str, int] = {}
        self.violations: list[str] = []

    async def run(self) -> None:
        """Watch until cancelled."""
        with redis_client.Redis.from_url(self._url, socket_timeout=5) as store:
            while True:
                with contextlib.suppress(redis_client.ConnectionError, redis_client.TimeoutError):
                    self._look(store)
                await asyncio.sleep(WATCH_S)

    def _look(self, store: SyncConnection) -> None:
        epochs = [redis_keys.scheduler_epoch(), *store.scan_iter(f"{redis_keys.prefix(self._pool)}epoch:*", SCAN_COUNT)]
        for name in epochs:
            self._note(str(name), int(store.get(name) or 0))
        for name in store.scan_iter(f"{redis_keys.log(self._pool, RunId(''))}*", SCAN_COUNT):
            for field, value in zip(("done", "snap"), store.hmget(name, ["done", "snap"]), strict=True):
                self._note(f"{name} {field}", int(value or -1))
            self._look_ahead(store, RunId(name.decode().rpartition("log:")[2]))

    def _look_ahead(self, store: SyncConnection, run: RunId) -> None:
        """Check that no planned op has a result.

        The order of the reads matters, since a commit writes both at once.
        """
        name, pipeline = redis_keys.log(self._pool, run), store.pipeline(transaction=False)
        done, after = (int(value or 0) for value in store.hmget(name, ["done", "next"]))
        ahead = [request_id(run, seq) for seq in range(done + 1, after)]
        for request in ahead:
            pipeline.exists(redis_keys.result(request))
        seen = [request for request, is_there in zip(ahead, pipeline.execute(), strict=True) if is_there]
        # An op that was put back concurrently may have failed since then, because its run ended.
        done, after = (int(value or 0) for value in store.hmget(name, ["done", "next"]))
        early = [request for request in seen if done < seq_of(request) < after]
        self.violations += [f"I4 {request} has a result, and {done} is committed" for request in early]

    def _note(self, name: str, value: int) -> None:
        before = self._seen.get(name, value)
        if value < before:
            self.violations.append(f"I6 {name} went back from {before} to {value}")
        self._seen[name] = value


def _refers(op: QueuedOp, done: int) -> bool:
    """Return True if an op in the log refers to a record of the spool; a forward releases it at its
    commit."""
    return op.ref != "inline" and not (op.kind is OpKind.FORWARD and op.seq <= done)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


#: Names that Redis scans per command. With its default, most work of a trial would be these scans.
SCAN_COUNT = 1_000
#: Depth below the data folder of files, or of folders that are one object, by kind.
PLACES = {"spool": "*", "snapshots": "*/*", "weights": "??/*", "optimizers": "??/*", "external": "*"}


def leftovers(folder: Path, store: SyncConnection, pool: PoolId) -> list[str]:
    """List unreferenced files, as paths below the data folder."""
    wanted = set(_wanted(store, pool))
    found = ((path.relative_to(folder), path.stem) for path in _written(folder))
    return sorted(
        str(path)
        for path, stem in found
        if {(path.parts[0], name) for name in (stem, path.name, "/".join(path.parts[1:]))}.isdisjoint(wanted)
    )  # fmt: skip


def _written(folder: Path) -> list[Path]:
    return [path for place, pattern in PLACES.items() for path in (folder / place).glob(pattern)]


def _wanted(store: SyncConnection, pool: PoolId) -> Iterable[tuple[str, str]]:
    """Yield the referenced files, as kind and name."""
    for log in store.scan_iter(f"{redis_keys.log(pool, RunId(''))}*", SCAN_COUNT):
        files = store.hmget(log, ["snapfile", "oldfile"])
        yield from (("snapshots", file.decode()) for file in files if file)
    for count in (redis_keys.spool_segment_refs(), redis_keys.spool_results()):
        yield from (("spool", segment.decode()) for segment in store.hkeys(count))
    for weights in store.smembers(redis_keys.pool_weights(pool)):
        row = store.hmget(f"cotrain:weights:{weights.decode()}", ["digest", "optimizer"])
        for place, digest in zip(("weights", "optimizers"), row, strict=True):
            if digest:
                yield place, digest.decode()
    for external in store.smembers(redis_keys.external_folders(pool)):
        yield "external", external.decode()


def accepted_from_replaced(reached: Iterable[str]) -> list[str]:
    """List the accepted commits that a worker began after its successor had entered.

    `reached` are the lines `<moment> <pid> <about>` of all processes, in the order of the moments.
    """
    violations = []
    holder: dict[str, str] = {}
    place: dict[str, str] = {}
    begun_late: set[str] = set()
    for line in reached:
        moment, pid, about = line.split(" ", 2)
        match moment:
            case "worker.entered":
                holder[about] = pid
                place[pid] = about
            case "worker.before_commit" if holder[place[pid]] != pid:
                begun_late.add(pid)
            case "worker.after_commit" if pid in begun_late:
                violations.append(f"I6 {pid} committed {about} after {place[pid]} was another's")
    return violations
