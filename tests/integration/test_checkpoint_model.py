"""Checkpoints against a dict of names, step by step, on a real Redis (hypothesis).

The model is the simple specification: a name refers to its newest stored save; weights exist while
a name or a load refers to them.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from typing_extensions import override

from cotrain_store import redis_keys
from cotrain_store.errors import CheckpointNotFound
from cotrain_store.messages.ids import OpId, RequestId, RunId, TenantId, WeightsRef
from cotrain_store.messages.ops import OpKind, Result, ResultKind
from cotrain_store.messages.runs import CheckpointKind, CheckpointRecord, RunState, SaveRecords
from cotrain_store.tenants.checkpoints import Checkpoints
from tests.support.draws import examples
from tests.support.log import record_of
from tests.support.redis_server import EmbeddedRedis
from tests.support.samples import open_samples

RUNS = 2
A = TenantId("a")
Name = tuple[RunId, "CheckpointKind", str]
NUMBERS = st.integers(0, RUNS - 1)
KINDS = st.sampled_from(["weights", "sampler_weights"])
#: One name is enough, because kinds and runs do not share names.
NAME = "x"


@dataclass
class SaveModel:
    """One save and its state."""

    name: Name
    seq: int
    state: str
    """"owed", "stored", "refused" or "lost"."""
    may_have_name: bool = True
    """True while no later save of its name is stored."""


@dataclass
class RunModel:
    """Progress of a run's log, and the weights that its loads use."""

    done: int = 0
    snap: int = -1
    loads: dict[int, WeightsRef] = field(default_factory=dict)


class CheckpointMachine(RuleBasedStateMachine):
    """Save, store, lose, delete, copy, load, cut and sweep; after every step the store equals the
    model."""

    server: EmbeddedRedis

    @initialize()
    def start(self) -> None:
        self.server.flush()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.opened = open_samples(self.server.url, Path(self.folder.name))
        self.samples = self.wait(self.opened.__aenter__())
        self.checkpoints = Checkpoints(self.samples.log.connection)
        self.records = [record_of("a", f"s{number}") for number in range(RUNS)]
        self.runs = [RunModel() for _ in range(RUNS)]
        self.saves: dict[WeightsRef, SaveModel] = {}
        self.names: dict[Name, WeightsRef] = {}
        self.copies = 0
        for record in self.records:
            self.wait(self.samples.log.intake.create_run(record))
        self.wait(self.samples.log.run_all())

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    def owed(self) -> list[WeightsRef]:
        return [ref for ref, save in self.saves.items() if save.state == "owed"]

    def in_use(self) -> set[WeightsRef]:
        held = {ref for run in self.runs for ref in run.loads.values()}
        return held | set(self.names.values())

    @rule(number=NUMBERS, kind=KINDS, overwrites=st.lists(st.booleans(), min_size=1, max_size=3))
    def save(self, number: int, kind: CheckpointKind, overwrites: list[bool]) -> None:
        """Save under one name, possibly several times in one step."""
        record, run = self.records[number], self.runs[number]
        where: Name = (record.id, kind, NAME)
        records: dict[OpId, SaveRecords] = {}
        for overwrite in overwrites:
            run.done += 1
            describe = self.samples.describe_save
            records |= self.wait(describe(record, run.done, name=NAME, kind=kind, overwrite=overwrite))
            # A later save was stored first, so this pending save has no claim to the name.
            of_name = [save for save in self.saves.values() if save.name == where]
            is_pending = any(save.state == "owed" and save.may_have_name for save in of_name)
            is_taken = kind == "weights" and not overwrite and (where in self.names or is_pending)
            event(f"save refused: {is_taken}")
            state = "refused" if is_taken else "owed"
            ref = WeightsRef(f"{record.id}:{run.done}")
            self.saves[ref] = SaveModel(where, run.done, state)
        step = self.wait(self.samples.log.plan())
        results = {op.id: Result.of_json({"seq": op.seq}) for op in step.ops}
        self.samples.log.execution.commit(step, results, {}, {}, saves=records)

    @precondition(lambda self: self.owed())
    @rule(which=st.randoms(use_true_random=False))
    def store(self, which: Any) -> None:
        self.note_stored(which.choice(self.owed()))

    def note_stored(self, ref: WeightsRef) -> None:
        save = self.saves[ref]
        assert self.samples.saved.mark_stored(ref, f"digest of {ref}", 10)
        save.state = "stored"
        event(f"stored, moves its name: {save.may_have_name}")
        if save.may_have_name:
            self.names[save.name] = ref
            for other in self.saves.values():
                if other.name == save.name and other.seq < save.seq:
                    other.may_have_name = False

    @precondition(lambda self: self.owed())
    @rule(which=st.randoms(use_true_random=False))
    def lose(self, which: Any) -> None:
        ref = which.choice(self.owed())
        self.samples.saved.fail_save(ref, "lost")
        self.saves[ref].state = "lost"

    @rule(number=NUMBERS, kind=KINDS)
    def delete(self, number: int, kind: CheckpointKind) -> None:
        where: Name = (self.records[number].id, kind, NAME)
        if where in self.names:
            self.wait(self.checkpoints.delete(A, *where))
            del self.names[where]
        else:
            with pytest.raises(CheckpointNotFound):
                self.wait(self.checkpoints.delete(A, *where))

    @precondition(lambda self: self.names)
    @rule(which=st.randoms(use_true_random=False), into=NUMBERS)
    def load(self, which: Any, into: int) -> None:
        ref = self.names[which.choice(sorted(self.names))]
        record, run = self.records[into], self.runs[into]
        run.done += 1
        submit = self.samples.log.intake.submit
        self.wait(submit(record, run.done, OpKind.LOAD, b"{}", 0, "d", uses=[ref]))
        self.wait(self.samples.log.run_all())
        run.loads[run.done] = ref

    @precondition(lambda self: self.names)
    @rule(which=st.randoms(use_true_random=False))
    def copy(self, which: Any) -> None:
        where = which.choice(sorted(self.names))
        source = self.wait(self.checkpoint(where))
        self.copies += 1
        made = replace(record_of("a", f"copy{self.copies}"), state=RunState.CLOSED)
        self.wait(self.checkpoints.copy(source, made, None))
        self.names[made.id, where[1], where[2]] = self.names[where]

    @rule(number=NUMBERS, settles=st.booleans())
    def cut_the_log(self, number: int, settles: bool) -> None:
        record, run = self.records[number], self.runs[number]
        owed = [ref for ref in self.owed() if ref.startswith(f"{record.id}:")]
        if settles:
            for ref in owed:
                self.note_stored(ref)
            owed = []
        registered = self.samples.log.execution.register_snapshot(record.id, run.done, f"f{run.done}", "sha")
        assert registered == (run.done > run.snap and not owed)
        if registered:
            run.loads = {seq: ref for seq, ref in run.loads.items() if seq > run.snap}
            run.snap = run.done

    @rule()
    def sweep(self) -> None:
        stored = {ref for ref, save in self.saves.items() if save.state == "stored"}
        unused = {weights.ref for weights in self.samples.saved.unused_weights()}
        assert unused == stored - self.in_use()
        for ref in stored:
            forgotten = self.samples.saved.forget_weights(ref)
            assert forgotten == (ref in unused)
        for ref in unused:
            event("forgotten")
            self.saves[ref].state = "forgotten"

    async def checkpoint(self, where: Name) -> CheckpointRecord | None:
        path = f"tinker://{where[0]}/{where[1]}/{where[2]}"
        try:
            found: CheckpointRecord = await self.samples.records.checkpoint(A, path)
        except CheckpointNotFound:
            return None
        return found

    @invariant()
    def every_name_refers_to_what_the_model_says(self) -> None:
        for where in {save.name for save in self.saves.values()} | set(self.names):
            found = self.wait(self.checkpoint(where))
            assert (found and found.weights) == self.names.get(where)

    @invariant()
    def the_lists_hold_these_names_and_no_others(self) -> None:
        redis = self.samples.log.redis
        listed = {member.decode() for member in redis.zrange(redis_keys.tenant_checkpoints(A), 0, -1)}
        assert listed == {redis_keys.checkpoint_member(*where) for where in self.names}
        for run in {where[0] for where in self.names}:
            of_run = {member.decode() for member in redis.zrange(redis_keys.run_checkpoints(run), 0, -1)}
            assert of_run == {f"{kind}/{name}" for at, kind, name in self.names if at == run}
        counted = len(self.names) + len(self.owed()), 10 * len(self.names)
        assert self.wait(self.checkpoints.stored_bytes(A)) == counted

    @invariant()
    def a_save_is_answered_when_its_fate_is_known(self) -> None:
        for ref, save in self.saves.items():
            result = self.samples.result(RequestId(ref))
            assert (result is None) == (save.state == "owed")
            has_failed = save.state in ("refused", "lost")
            assert result is None or (result.kind is ResultKind.FAILURE) == has_failed

    @invariant()
    def weights_in_use_are_there(self) -> None:
        for ref in self.in_use():
            weights = self.samples.saved.weights(ref)
            assert weights
            assert self.samples.saved.has_content(weights.digest)

    @override
    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.wait(self.opened.__aexit__(None, None, None))
            self.loop.close()
            self.folder.cleanup()


def test_checkpoints_behave_like_their_model(redis_server: EmbeddedRedis) -> None:
    CheckpointMachine.server = redis_server
    run_state_machine_as_test(
        CheckpointMachine, settings=settings(max_examples=examples(30), stateful_step_count=40, deadline=None)
    )
