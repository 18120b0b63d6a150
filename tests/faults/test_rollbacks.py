"""Loss of the disk with all snapshots, and a kill at each moment of the rollback that follows."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.host import MODEL, Host
from tests.faults.invariants import PageRequest, unexpected
from tests.faults.orders import Nursery
from tests.faults.scenarios import POLL_S
from tests.faults.traffic import Call, Player, Program, client_of
from tests.support.waiting import until

RUNS = 4
MOMENTS = ("worker.before_rollback", "worker.after_rollback")
#: Parts of the state in a snapshot, apart from its position in the log.
STATE = ("weights", "grads", "m", "v", "step", "spec", "grads_pending")


def a_pass(token: int) -> Call:
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [token, 2, 3]}]},
        "loss_fn_inputs": {
            "target_tokens": {"dtype": "int64", "data": [2, 3, 4]},
            "weights": {"dtype": "float32", "data": [1.0] * 3},
        },
    }
    data = {"data": [datum], "loss_fn": "cross_entropy"}
    return Call("forward_backward", {"forward_backward_input": data})


STEP = Call("optim_step", {"adam_params": {"learning_rate": 1e-2, "beta2": 0.95, "eps": 1e-8}})
KEPT = [a_pass(5), STEP, Call("save_weights", {"path": "kept"})]
LOST = [a_pass(6), STEP, a_pass(7)] * 3  # enough for two snapshots
FAILS = [a_pass(8)]
LATER = [a_pass(9), STEP, a_pass(10)]
BACK = [Call("load_weights", {"path": "kept", "optimizer": True})]


def program(number: int, parts: Sequence[Sequence[Call]]) -> Program:
    return Program(rank=4, seed=number, parts=parts, end=[], samples=0)


async def play(
    nursery: Nursery, folder: Path, first: Sequence[Sequence[Call]], then: Sequence[Sequence[Call]], **settings: str
) -> tuple[Host, list[Mapping[str, Any]], list[dict[str, str]]]:
    """Play `first`; if `then` follows, lose all snapshots in between.

    Return answers and endings.
    """
    async with Host(nursery, folder, settings) as host, asyncio.timeout(150):
        clients = [client_of(host.address, n, n) for n in range(RUNS)]
        players = [Player(client, program(n, first)) for n, client in enumerate(clients)]
        await asyncio.gather(*(player.play() for player in players))
        if then:
            await _lose_copies(host)
        for calls in then:
            await asyncio.gather(*(player.send(calls) for player in players))
        await host.calm()
        played = await asyncio.gather(*(player.finish() for player in players))
        await host.stop()
        with host.store() as store:
            look = PageRequest(store, folder, MODEL)
            ending = look.ending(played)
            assert look.violations() == []
        for client in clients:
            await client.http.aclose()
    nursery.tally.add(Counter(death.name for death in host.deaths), unexpected(host.deaths))
    states = [{what: state.get(what, "none") for what in STATE} for state in ending.states]
    return host, list(ending.answers), states


async def _lose_copies(host: Host) -> None:
    """Delete all snapshots, once no log reaches back to the start of its run."""
    with host.store() as store:
        logs = list(store.scan_iter("cotrain:{*}:log:*"))
        await until(lambda: all(int(store.hget(log, "oldsnap") or -1) >= 0 for log in logs), POLL_S)
    host.before_restart = lambda _: shutil.rmtree(host.folder / "snapshots", ignore_errors=True)
    host.kill("w0")
    await until(lambda: host.deaths, POLL_S)
    host.before_restart = lambda _: None


@pytest.mark.faults
@pytest.mark.asyncio(loop_scope="session")
async def test_a_kill_during_a_rollback_changes_nothing_after_it(
    nursery: Nursery, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (calm := folder / "calm").mkdir()
    _, _, expected = await play(nursery, calm, [KEPT, LOST, BACK, LATER], [])
    faults = ",".join(f"{moment}=kill@{nth}" for moment in MOMENTS for nth in (1, 2, 3))
    host, answers, states = await play(nursery, folder, [KEPT, LOST], [FAILS, LATER], FAILPOINTS=faults)
    assert states == expected
    assert unexpected(host.deaths) == []
    assert len(host.deaths) == 1 + 3 * len(MOMENTS)
    for told in answers:
        failed = {name: answer["error"] for name, answer in told.items() if "error" in answer}
        (error,) = failed.values()
        assert "goes on from" in error
