"""Sweeps on a real server: each run as if alone, one upload for all, and a worker that is killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result
from typing_extensions import override

from cotrain import (
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    NotFoundError,
    RequestFailed,
    ServiceClient,
    Sweep,
    TrainingClient,
    UnsupportedInput,
)
from cotrain.cli import command_line
from tests.conformance.running import KEYS, ROOT
from tests.support.serving import Serving
from tests.support.tiny_models import build_tiny_qwen3

TRIALS: list[dict[str, Any]] = [
    {"rank": rank, "lr": lr, "seed": seed} for rank in (2, 4) for lr in (1e-3, 3e-3, 1e-2, 3e-2) for seed in (0, 1)
]
STEPS = 4


def batch(number: int, length: int = 24) -> list[Datum]:
    rng = random.Random(number)
    rows = [rng.choices(range(512), k=length + 1) for _ in range(6)]
    return [
        Datum(
            model_input=ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * length},
        )
        for row in rows
    ]


class Counted(httpx.AsyncHTTPTransport):
    """Network that counts the sent bytes by endpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.sent_bytes: Counter[str] = Counter()

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.sent_bytes[request.url.path.rpartition("/")[2]] += len(request.content)
        return await super().handle_async_request(request)


@dataclass
class World:
    """A server, its base model, and a client."""

    serving: Serving
    base_model: str
    service: ServiceClient
    network: Counted

    def kill_worker(self) -> None:
        """Send SIGKILL to the worker; the supervisor starts another one."""
        pid = re.findall(r"worker-w0 started \(pid (\d+)\)", self.serving.log)[-1]
        os.kill(int(pid), signal.SIGKILL)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = str(build_tiny_qwen3(tmp_path_factory.mktemp("models") / "tiny"))
    network = Counted()
    with (
        Serving(tmp_path_factory.mktemp("data"), [folder], KEYS) as serving,
        ServiceClient(serving.address, KEYS[0], network=network) as service,
    ):
        yield World(serving, folder, service, network)


def exact(output: ForwardBackwardOutput) -> Any:
    return output.metrics["loss:sum"], [o["logprobs"].tolist() for o in output.loss_fn_outputs]


def numbers_of(sweep: Sweep[TrainingClient], world: World | None = None) -> list[dict[int, Any]]:
    """Train; with `world`, kill the worker half-way. Return all numbers of each step by trial."""
    numbers: list[dict[int, Any]] = []
    for half in (range(STEPS // 2), range(STEPS // 2, STEPS)):
        waiting = [sweep.train(batch(number)) for number in half]
        if world and numbers:
            world.kill_worker()
        for each in waiting:
            output = each.result()
            assert not output.failures
            numbers.append({at: exact(output[at].forward_backward) for at in output})
    return numbers


def test_a_sweep_of_16_is_exact_sent_once_and_survives_the_death_of_its_worker(world: World) -> None:
    undisturbed = world.service.create_sweep(world.base_model, TRIALS)
    world.network.sent_bytes.clear()
    first = numbers_of(undisturbed)
    of_sweep = world.network.sent_bytes["sweep_pass"]

    killed = world.service.create_sweep(world.base_model, TRIALS)
    assert numbers_of(killed, world) == first
    assert first[-1][0] != first[-1][1]  # of other seeds

    world.network.sent_bytes.clear()
    for at in (3, 14):
        adapter = {name: value for name, value in TRIALS[at].items() if name != "lr"}
        run = world.service.create_lora_training_client(world.base_model, **adapter)
        for number in range(STEPS):
            output = run.train(batch(number), learning_rate=TRIALS[at]["lr"]).result()
            assert exact(output.forward_backward) == first[number][at]
    sent = world.network.sent_bytes
    of_one_run = (sent["forward_backward"] + sent["optim_step"]) / 2
    assert of_sweep <= of_one_run  # a sixteenth of the bytes of 16 runs

    evaluated = killed.evaluate(batch(9)).result().losses
    assert killed.best().number == min(evaluated, key=evaluated.__getitem__)
    ended = killed.prune(3)
    assert len(ended) == 13
    assert sorted(trial.number for trial in killed.live) == sorted(sorted(evaluated, key=evaluated.__getitem__)[:3])
    cycles = {output.metrics["clock_cycle:unique"] for output in killed.train(batch(5)).result().outputs.values()}
    assert len(cycles) == 1
    with pytest.raises(UnsupportedInput, match=r"a share above 0 and below 1, not 1\.0"):
        killed.prune(1.0)  # a share of all, or one trial
    killed.close()
    with pytest.raises(UnsupportedInput, match="all trials"):
        killed.train(batch(5))
    with pytest.raises(UnsupportedInput, match="all trials"):
        killed.best()


def test_a_run_that_ended_fails_alone_and_a_bad_batch_fails_for_all(world: World) -> None:
    sweep = world.service.create_sweep(world.base_model, [{"rank": 1}, {"rank": 1, "lr": 0.1}])
    too_large = Datum(
        model_input=ModelInput.from_ints([1, 999]), loss_fn_inputs={"target_tokens": [999, 2], "weights": [1.0, 1.0]}
    )
    with pytest.raises(RequestFailed, match="999"):
        sweep.train([too_large]).result()
    for compared in (sweep.best, sweep.prune):
        with pytest.raises(UnsupportedInput, match="no trial has a finite loss"):
            compared()
    assert len(sweep.live) == 2
    sweep.trials[1].run.unload()
    output = sweep.train(batch(0)).result()
    assert list(output) == [0]
    assert "unloaded" in str(output.failures[1])
    assert "unloaded" in sweep.trials[1].failure
    assert sweep.best().number == 0
    with ServiceClient(world.serving.address, KEYS[1]) as other:
        stranger = other.create_sweep(world.base_model, [{"rank": 1}])
        stranger.trials.append(sweep.trials[0])
        output = stranger.train(batch(0)).result()
        assert isinstance(output.failures[0], NotFoundError)


def test_halving_keeps_the_better_part_after_doubling_steps(world: World) -> None:
    rates = [{"rank": 1, "lr": 10.0**-at} for at in (1, 2, 3, 5)]
    sweep = world.service.create_sweep(world.base_model, rates, name="halving")
    live: list[int] = []
    best = sweep.halve([batch(0)] * 6, steps=1, evaluation=batch(0), progress=lambda s: live.append(len(s.live)))
    assert [len(trial.losses) for trial in sorted(sweep.trials, key=lambda t: -len(t.losses))] == [
        6, 2, 1, 1,
    ]  # fmt: skip
    assert live[-1] == 1
    assert best is sweep.live[0]
    assert best.score == min(trial.score for trial in sweep.trials)

    page = httpx.get(f"{world.serving.address}/ui/compare?sweep=halving", headers={"X-API-Key": KEYS[0]}).text
    assert page.count("<polyline") == len(rates)
    assert "Last loss by learning rate" in page
    assert page.count("lr 0.1, rank 1") >= 2


def test_forks_continue_as_runs_that_load_the_state_of_their_parent(world: World) -> None:
    rates = [1e-3, 1e-2]
    parent = world.service.create_lora_training_client(world.base_model, rank=4, seed=5)
    for number in range(2):
        parent.train(batch(number), learning_rate=1e-2)
    forks = parent.fork(lr=rates)
    world.kill_worker()
    trained = [forks.train(batch(number)) for number in (2, 3)]
    path = parent.save_state().result().path
    for at, rate in enumerate(rates):
        loaded = world.service.create_training_client_from_state_with_optimizer(path)
        for number, each in zip((2, 3), trained, strict=True):
            output = loaded.train(batch(number), learning_rate=rate).result()
            assert exact(output.forward_backward) == exact(each.result()[at].forward_backward)
    with pytest.raises(UnsupportedInput, match="n is 3, and lr has 2 rates"):
        parent.fork(3, lr=rates)
    assert parent.train(batch(2)).result().loss == trained[0].result()[0].loss


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "1 to 64 trials, not 0"),
        ([{"lr": 1}, {"size": 3}], r"settings\[1\] has no size; it has lr, rank"),
        ([{"lr": 1, "learning_rate": 1}], "are one setting"),
    ],
)
def test_wrong_settings_are_refused_by_name(world: World, settings: list[dict[str, float]], message: str) -> None:
    with pytest.raises(UnsupportedInput, match=message):
        world.service.create_sweep(world.base_model, settings)


def test_the_command_trains_all_combinations_and_saves_the_best(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "chats.jsonl"
    chats = [
        {"messages": [{"role": "user", "content": each}, {"role": "assistant", "content": "yes"}]}
        for each in ("one", "two", "three", "four")
    ]
    file.write_text("\n".join(map(json.dumps, chats)))
    monkeypatch.setenv("COTRAIN_BASE_URL", world.serving.address)
    monkeypatch.setenv("COTRAIN_API_KEY", KEYS[2])

    def run(*options: str) -> Result:
        return CliRunner().invoke(
            command_line([]), ["sweep", str(file), "--lr", "1e-4,1e-2", "--rank", "1,2", *options]
        )

    found = json.loads(run("--batch-size=2", f"--evaluate={file}", "--json").stdout)
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    [row] = re.findall(r"^\| `sweep` \|.*", page, re.MULTILINE)
    fields = set(re.findall(r"`([a-z_]+)`", row))
    assert fields == {*found, *found["trials"][0]}
    best = min(found["trials"], key=lambda trial: trial["evaluation"])
    assert (found["best"], best["steps"], best["lr"]) == (best["trial"], 2, 1e-2)
    assert found["path"].endswith("/weights/sweep-best")
    assert {trial["ended"] for trial in found["trials"]} == {False}

    shown = run("--steps=2", "--halve-after=1", "--schedule=cosine", "--seed=3").stdout
    assert "The best is run" in shown
    assert shown.count("2/2") == 2
    assert "1/2" in shown
    monkeypatch.setattr("cotrain.commands.data.LINE_EVERY_S", 0.0)
    train, trained = Sweep.train, iter(range(9))

    def interrupted(sweep: Sweep[Any], *args: Any, **options: Any) -> Any:
        if next(trained) == 2:
            raise KeyboardInterrupt
        return train(sweep, *args, **options)

    monkeypatch.setattr(Sweep, "train", interrupted)
    stopped = run("--steps=4")
    assert re.search(r"^step 1 of 4: the lowest loss is [\d.]+, of run \d$", stopped.stderr, re.MULTILINE)
    assert stopped.stderr.endswith("interrupted after 2 of 4 steps: the best run so far is saved\n")
    assert ("The best is run" in stopped.stdout, stopped.exit_code) == (True, 1)
    wrong = run("--lr", "fast")
    assert (wrong.exit_code, "--lr must be numbers" in wrong.stderr) == (1, True)
