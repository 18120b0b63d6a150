"""Deliberate defects, each in a copy of the sources: the scenario named beside it must notice.

An edit names the line as it is in the sources, so that a change there also asks for a look at the mutant.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.warm.sources import ROOT

FOLDERS = ("client", "scheduler", "server", "workers")
WORKERS = "workers/cotrain_workers"
STORE = "scheduler/cotrain_store"
SCHEDULER = "scheduler/cotrain_scheduler"


@dataclass(frozen=True)
class Edit:
    """Replace every occurrence of `old` in a file, of which there is one at least."""

    file: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Change a copy; raises AssertionError where the sources have moved on."""
        path = root / self.file
        text = path.read_text()
        assert self.old in text, f"{self.file} has no {self.old!r} any more"
        path.write_text(text.replace(self.old, self.new))


@dataclass(frozen=True)
class Mutant:
    """A defect, and the scenario that catches it."""

    edits: Sequence[Edit]
    scenario: str

    def plant(self, root: Path) -> list[str]:
        """Copy the sources below `root` and spoil them; return the folders to import from."""
        for folder in FOLDERS:
            shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
        for edit in self.edits:
            edit.apply(root)
        return [str(root / folder) for folder in FOLDERS]


_PUBLISH = "redis.call('PUBLISH', 'cotrain:notify:results', table.concat(resolved, '\\n'))\n"

MUTANTS = {
    "no replay": Mutant(
        [Edit(f"{WORKERS}/recovery/replay.py", "            ops = _from_last_load(ops)\n", "            ops = []\n")],
        "killed after a commit",
    ),
    "double gradient": Mutant(  # a recovery copy that says it is one request older than it is
        [
            Edit(
                f"{WORKERS}/recovery/recovery_copies.py",
                "        copy = self._engine.adapters.copy_out(run)\n",
                "        copy, backlog = self._engine.adapters.copy_out(run), ReplayBacklog(backlog.seq - 1)\n",
            )
        ],
        "killed behind a recovery copy",
    ),
    "torn snapshot accepted": Mutant(
        [
            Edit(
                f"{WORKERS}/checkpoints/state_files.py",
                "if hashlib.sha256(content).hexdigest() != sha256:",
                "if not content:",
            )
        ],
        "recovery copies are torn",
    ),
    "snapshot before commit": Mutant(
        [
            Edit(
                f"{WORKERS}/worker/loop.py",
                "            self._commit(step, commit)",
                "            long = dict.fromkeys(commit.device_s, 1e9)\n"
                "            self._runs.copies.committed(step, commit.results, long)\n"
                "            self._runs.copies.drain(9.0)\n"
                "            self._commit(step, commit)",
            ),
            Edit(
                f"{WORKERS}/recovery/recovery_copies.py",
                "        self._writer.shutdown(wait=False, cancel_futures=True)\n",
                "",
            ),
            Edit(f"{STORE}/scripts/snapshot.lua", " or seq > done", ""),
        ],
        "killed before a commit",
    ),
    "no fencing": Mutant(
        [
            Edit(
                f"{STORE}/scripts/lib/fence.lua", "if redis.call('GET', args.fence) ~= args.epoch then", "if false then"
            ),
            Edit(f"{STORE}/oplog/execution.py", "int(current) != self.epoch", "int(current) < 0"),
        ],
        "a place is taken",
    ),
    "lost wake-up": Mutant(
        [
            Edit(f"{STORE}/results/futures.py", "        await self._resolve(list(self._waiters))\n", ""),
            Edit(f"{STORE}/scripts/commit.lua", _PUBLISH, ""),
        ],
        "no client asks twice",
    ),
    "result before log": Mutant(
        [
            Edit(
                f"{WORKERS}/worker/loop.py",
                '        failpoint("worker.before_commit"',
                "        for (run, seq), told in commit.results.items():\n"
                "            self._execution._redis.set(\n"
                "                f'cotrain:result:{run}:{seq}', told.encode(), nx=True\n"
                "            )\n"
                '        failpoint("worker.before_commit"',
            )
        ],
        "a commit that takes its time",
    ),
    "spool reference before fsync": Mutant(
        [
            Edit(
                f"{STORE}/disk/spool.py",
                "refs = self._append_all(payloads)\n",
                "refs = self._append_all(payloads, batch)\n",
            ),
            Edit(
                f"{STORE}/disk/spool.py",
                "def _append_all(self, payloads: list[bytes]) -> list[str]:\n",
                "def _append_all(self, payloads, batch) -> list[str]:\n",
            ),
            Edit(
                f"{STORE}/disk/spool.py",
                '            failpoint("spool.before_sync", refs)\n',
                "            for (_, durable), ref in zip(batch, refs, strict=True):\n"
                "                durable.set_result(ref)\n"
                '            failpoint("spool.before_sync", refs)\n',
            ),
            Edit(
                f"{STORE}/disk/spool.py",
                "        for (_, durable), ref in zip(batch, refs, strict=True):\n"
                "            durable.set_result(ref)\n\n",
                "\n",
            ),
        ],
        "power is lost before the spool is synced",
    ),
    "answer before log": Mutant(
        [
            Edit(
                f"{STORE}/oplog/intake.py",
                "        answer: list[Any] = await self._submit(",
                "        if submission.seq and submission.op.envelope:\n"
                "            import asyncio\n\n"
                "            async def later() -> None:\n"
                "                await asyncio.sleep(0.1)\n"
                "                await self._submit(submission, inline, inline_save)\n\n"
                "            asyncio.get_running_loop().create_task(later())\n"
                "            return [b'NEW', submission.seq]\n"
                "        answer: list[Any] = await self._submit(",
            )
        ],
        "killed before a request is logged",
    ),
    "no turns": Mutant(
        [
            Edit(
                f"{SCHEDULER}/queue.py",
                "return self._served[tenant] + self._parts[tenant] / self._weights.get(tenant, WEIGHT)",
                "return 0",
            )
        ],
        "a full house",
    ),
    "leftovers stay": Mutant(
        [
            Edit(
                f"{WORKERS}/recovery/orphan_sweep.py",
                "{key: mark for key, mark in free.items() if key not in referenced}",
                "{}",
            )
        ],
        "killed before a request is logged",
    ),
    "sweeps by mtime": Mutant(
        [
            Edit(f"{STORE}/scripts/lib/swept.lua", "return number <= ", "return false and number <= "),
            Edit(f"{STORE}/disk/spool.py", " if not (folder and _is_locked(folder / key))}", "}"),
            Edit(
                f"{STORE}/disk/sweep.py",
                "        return [key for key, (_, since) in self._since.items() if now - since",
                "        from time import time\n\n"
                "        return [key for key, (m, _) in self._since.items() if time() - int(m.split(':')[3]) / 1e9",
            ),
        ],
        "files look two days old",
    ),
    "lost change notification": Mutant(
        [
            Edit(f"{STORE}/scripts/submit.lua", "  record_change(prefix, run)\n", ""),
            Edit(f"{SCHEDULER}/pool_scheduler.py", "if len(self._queue) != view.ready:", "if False:"),
        ],
        "no client asks twice",
    ),
    "stale in-memory queue": Mutant(
        [
            Edit(f"{SCHEDULER}/scheduler.py", "if self._dispatch.epoch != epoch:", "if epoch == 0:"),
            Edit(f"{SCHEDULER}/pool_scheduler.py", "if len(self._queue) != view.ready:", "if False:"),
            Edit(  # of a run that it knows it ignores what changed, which would mend its queue with the next commit
                f"{SCHEDULER}/pool_scheduler.py",
                "self._queue.put(view.queues)",
                "self._queue.put(q for q in view.queues if q.run not in self._queue._runs)",
            ),
            Edit(f"{STORE}/scripts/plan.lua", " or tonumber(log[2]) ~= part.first", ""),
        ],
        "the lead is taken and given back",
    ),
}
