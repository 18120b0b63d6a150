"""What of a run one cycle may hold."""

from __future__ import annotations

from cotrain_scheduler.backlog import runnable_prefix
from cotrain_store.messages.ops import OpKind
from tests.support.planning import op


def test_a_step_submitted_whole_runs_in_one_cycle() -> None:
    step = [op("r", 1), op("r", 2), op("r", 3, OpKind.OPTIM_STEP)]
    assert runnable_prefix([*step, op("r", 4)]) == step


def test_what_is_saved_is_what_the_step_left() -> None:
    step = [op("r", 1), op("r", 2, OpKind.OPTIM_STEP), op("r", 3, OpKind.SAVE)]
    rejected = op("r", 4, OpKind.REJECTED)
    saves = [op("r", 5, OpKind.SAVE), op("r", 6, OpKind.SAVE)]
    cycle = [*step, rejected, *saves]
    assert runnable_prefix([*cycle, op("r", 7)]) == cycle
    assert runnable_prefix([*cycle, op("r", 7, OpKind.OPTIM_STEP)]) == cycle
    assert runnable_prefix([op("r", 1), op("r", 2, OpKind.SAVE), op("r", 3)]) == [
        op("r", 1),
        op("r", 2, OpKind.SAVE),
    ]


def test_weights_are_not_reassigned_under_a_pass() -> None:
    cycle = [op("r", 1), op("r", 3, OpKind.SAVE), op("r", 4, OpKind.LOAD)]
    assert runnable_prefix([*cycle, op("r", 5)]) == cycle
    assert runnable_prefix([op("r", 5, OpKind.LOAD), op("r", 6, OpKind.OPTIM_STEP)]) == [
        op("r", 5, OpKind.LOAD)
    ]


def test_however_many_saves_and_loads_are_in_flight_a_cycle_takes_few_of_a_run() -> None:
    loads = [op("r", seq, OpKind.LOAD) for seq in range(1, 61)]
    assert runnable_prefix(loads) == loads[:1]
    saves = [op("r", seq, OpKind.SAVE) for seq in range(1, 61)]
    assert runnable_prefix(saves) == saves[:4]
    rejected = op("r", 5, OpKind.REJECTED)
    assert runnable_prefix([*saves[:4], rejected, *saves[5:]]) == [*saves[:4], rejected]
    mixed = [saves[0], op("r", 2, OpKind.LOAD), *saves[2:5], op("r", 6, OpKind.LOAD)]
    assert runnable_prefix(mixed) == mixed[:5]
    assert runnable_prefix(saves, takes_saves=False) == []
    assert runnable_prefix(mixed[1:], takes_saves=False) == mixed[1:2]


def test_a_run_trains_in_the_cycle_that_makes_it_unless_it_is_made_by_a_load() -> None:
    for kind in (OpKind.CREATE, OpKind.IMPORT):
        step = [op("r", 0, kind), op("r", 1, OpKind.REVERSE_KL), op("r", 2, OpKind.OPTIM_STEP)]
        assert runnable_prefix(step) == step
    loaded = op("r", 0, OpKind.LOAD)
    assert runnable_prefix([loaded, op("r", 1)]) == [loaded]
