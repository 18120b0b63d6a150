"""Recordings of a worker: they replay elsewhere, from the files alone, to the same bits."""

from __future__ import annotations

import json
from pathlib import Path

from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import LoraSpec
from cotrain_store.monitoring.recent_activity import cycle_records
from cotrain_workers.engine.engine import Engine
from cotrain_workers.recorder.file import RecordedCycle, read_cycle
from cotrain_workers.recorder.recorder import SUFFIX, Compared, compared, engine_for, restore_before, run_again
from tests.support.checkpoints import checkpoint_of, run_from, submit_load, submit_state
from tests.support.deaths import Failpoint, dying_worker
from tests.support.program import LORA, results, submit
from tests.support.stack import POOL, Stack, worker

REJECTED = {"error": "datum 0 has no tokens.", "category": "user"}


def recordings(folder: Path) -> list[RecordedCycle]:
    return [read_cycle(path) for path in sorted((folder / "recorder").glob(f"*/*/*{SUFFIX}"))]


def replayed(cycle: RecordedCycle, model: Path) -> list[Compared]:
    engine = engine_for(cycle.facts, str(model), device="cpu")
    restore_before(engine, cycle)
    return list(compared(cycle, run_again(engine, cycle), tolerance=0.0))


async def test_all_recorded_cycles_replay_to_the_same_bits(
    server: Stack, tmp_path: Path, engine: Engine, tiny_model: Path
) -> None:
    a, b = await server.create("a", "a", LORA), await server.create("b", "b", LoraSpec(2, 1))
    with worker(server, engine, record_cycles=100):
        requests = await submit(server, a, 1, 4)
        saved = await submit_state(server, a, 5)
        answers = await results(server, b, await submit(server, b, 1, 3))
        checkpoint = await checkpoint_of(server, a, saved)
        requests += [await submit_load(server, a, 6, checkpoint)]
        requests += await submit(server, a, 5, 8, place=7)
        body = json.dumps(REJECTED).encode()
        refused = await server.intake.submit(b, 4, OpKind.REJECTED, body, 0, digest="4")
        begun = await run_from(server, "a", "c", checkpoint)
        answers += await results(server, a, requests)
        answers += await results(server, b, [refused, *await submit(server, b, 4, 4, place=5)])
        answers += await results(server, begun, await submit(server, begun, 1, 4))
        rows = await cycle_records(server.futures._redis, POOL, 100)
    assert [each for each in answers if isinstance(each, dict) and "error" in each] == [REJECTED]
    cycles = recordings(tmp_path)
    assert [cycle.facts.step.cycle for cycle in cycles] == [row["cycle"] for row in reversed(rows)]
    kinds = {op.kind for cycle in cycles for op in cycle.facts.step.ops}
    assert {OpKind.SAVE, OpKind.LOAD, OpKind.REJECTED, OpKind.OPTIM_STEP} <= kinds
    again = [row for cycle in cycles for row in replayed(cycle, tiny_model)]
    assert {row.verdict for row in again} == {"equal"}
    kept = {
        (run["run"], int(seq)): digest for row in rows for run in row["runs"] for seq, digest in run["digests"].items()
    }
    shown = {(row.run, row.seq): row.digest for row in again if row.what not in ("save", "state after")}
    assert kept == shown


async def test_the_cycle_of_a_crashed_worker_is_kept_next_to_its_successors(
    server: Stack, tmp_path: Path, engine: Engine, tiny_model: Path
) -> None:
    run = await server.create("a", "a", LORA)
    requests = await submit(server, run, 1, 4)
    async with dying_worker(server, engine, Failpoint("commit", 1), record_cycles=9):
        pass
    engine.adapters.drop(run.id)
    with worker(server, engine, record_cycles=9):
        await results(server, run, requests)
    first, second = recordings(tmp_path)[:2]
    assert first.found is None
    assert first.facts.step.ops == second.facts.step.ops
    assert {row.verdict for row in replayed(second, tiny_model)} == {"equal"}
    digests = [[row.digest for row in replayed(cycle, tiny_model)] for cycle in (first, second)]
    assert digests[0] == digests[1]
