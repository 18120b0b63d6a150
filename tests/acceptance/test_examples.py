"""Acceptance test of the examples: each runs at a reduced size against one server and must show its
claim."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.support.processes import environment_of
from tests.support.serving import Serving
from tests.warm.popen import Popen
from tests.warm.sources import ROOT

EXAMPLES = ROOT / "examples"
KEY = "tml-example_key-of-mine"
#: Reduced size of the demo's base model, which has 3 layers and takes 300 steps over four times the
#: text. It still learns enough, and less text is learned in fewer steps.
MODEL_LAYERS, MODEL_CHARACTERS, MODEL_STEPS = 2, 300_000, 60
#: Characters of text of a model whose training is stopped.
FEW_CHARACTERS = 30_000
PNG = b"\x89PNG\r\n\x1a\n"

Rows = list[dict[str, Any]]
"""An example's table: its cells by their columns."""


class Run(Protocol):
    """Function that runs an example and returns its table. `sizes` replace constants of it."""

    def __call__(self, example: str, *options: str, **sizes: int) -> Rows: ...


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        demo_model = importlib.import_module("demo_model")
        patch.setitem(demo_model.SHAPE, "num_hidden_layers", MODEL_LAYERS)
        patch.setattr(demo_model, "STEPS", MODEL_STEPS)
        patch.setattr("demo_texts.MAX_CHARACTERS", MODEL_CHARACTERS)
        yield demo_model.cached_model(tmp_path_factory.mktemp("demo") / "model", lambda *_: None)


@pytest.fixture(scope="module")
def server(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("data"), [str(base_model)], [KEY]) as serving:
        yield serving


@pytest.fixture
def run(server: Serving, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return partial(run_at, server.address, monkeypatch, capsys)


def run_at(
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    example: str,
    *options: str,
    **sizes: int,
) -> Rows:
    """Run an example in this process, which has already loaded torch and transformers."""
    for name, value in environment_of(client_settings(address)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", [example, "--json", *options])
    monkeypatch.syspath_prepend(EXAMPLES)
    module = importlib.import_module(example.removesuffix(".py"))
    for name, size in sizes.items():
        monkeypatch.setattr(module, name, size)
    module.main()
    rows: Rows = json.loads(capsys.readouterr().out)
    return rows


def client_settings(address: str) -> dict[str, str]:
    return {"COTRAIN_BASE_URL": address, "COTRAIN_API_KEY": KEY}


def test_an_activity_is_announced_first_and_shows_its_progress(tmp_path: Path) -> None:
    # A fortieth of the text: it is read, used for the tokenizer and encoded before the first step.
    # A line is written every second. Nothing else depends on this training, so it is stopped.
    program = (
        f"import runpy, sys; sys.path.insert(0, {str(EXAMPLES)!r}); import demo_texts, how_far; "
        f"demo_texts.MAX_CHARACTERS, how_far.EVERY_S = {FEW_CHARACTERS}, 1.0; "
        f"runpy.run_path({str(EXAMPLES / 'make_model.py')!r}, run_name='__main__')"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "model")]
    with Popen(command, env=environment_of({}), stderr=subprocess.PIPE) as making:
        assert making.stderr is not None
        try:
            assert making.stderr.readline().decode() == "Making a base model …\n"
            line = making.stderr.readline().decode()
            assert not (tmp_path / "model").exists()
        finally:
            making.kill()
    assert re.fullmatch(r"Making a base model: step \d+ of \d+, [\d.]+ nats/token, \d+ s left\n", line)


def test_the_maker_of_a_model_reads_no_option_as_its_folder() -> None:
    command = [sys.executable, str(EXAMPLES / "make_model.py")]
    helped = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert helped.stdout.startswith("usage: make_model.py [-h] [folder]")
    assert subprocess.run([*command, "--steps"], capture_output=True, timeout=60).returncode == 2


def test_the_demo_prints_its_activity_before_it_loads_torch() -> None:
    # The model may exist already; the demo imports torch all the same.
    command = [sys.executable, "-X", "importtime", str(EXAMPLES / "demo.py")]
    said = ""
    with subprocess.Popen(
        command, env=environment_of({}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as demo:
        assert demo.stdout is not None
        try:
            for line in demo.stdout:
                # a submodule, which is listed before torch itself
                if re.search(r"\| +torch\.", line):
                    break
                said += "" if line.startswith("import time:") else line
        finally:
            demo.kill()
    assert said.splitlines() == ["Making a base model", "Loading torch and reading text …"]


def test_fine_tuning_lowers_the_held_out_loss(run: Run) -> None:
    before, *_, after = (row["loss"] for row in run("sft.py", "--steps=12"))
    assert after < 0.7 * before


def test_reinforcement_raises_the_reward(run: Run) -> None:
    *_, first, last = (row["reward"] for row in run("rl.py", "--steps=8"))
    assert last > 2 * first


def test_preferences_are_learned_for_held_out_pairs(run: Run) -> None:
    before, *_, after = run("dpo.py", "--steps=4")
    assert (before["margin"], before["share right"]) == (0, 0)
    assert after["margin"] > 1
    assert after["share right"] > 0.9


def test_distillation_lowers_the_divergence_from_the_teacher(run: Run) -> None:
    *_, first, last = (row["KL"] for row in run("distill.py", "--steps=4", TEACHER_STEPS=16, QUESTIONS=8))
    assert last < 0.9 * first


def test_a_sweep_starts_all_rates_alike_and_the_best_is_a_middle_one(run: Run) -> None:
    rows = run("sweep.py", "--steps=6")
    assert len({row["first step"] for row in rows}) == 1
    (best,) = (place for place, row in enumerate(rows) if row[""] == "best")
    assert 0 < best < len(rows) - 1


def test_a_killed_training_resumes_from_its_checkpoint_unchanged(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", Popen)  # processes that the example starts are forked
    rows = run("resume.py", "--steps=9")
    calm, killed, resumed = ([row[part] for row in rows] for part in ("undisturbed", "killed", "resumed"))
    assert killed == [*calm[:7], "", ""]
    assert resumed == ["", "", "", "", "", *calm[5:]]
    assert calm[-1] < calm[0]


def test_a_custom_loss_learns_and_equals_the_same_built_in_loss(run: Run) -> None:
    before, cross_entropy, gamma_0, *others = run("custom_loss.py", "--steps=4")
    assert gamma_0["all tokens"] == pytest.approx(cross_entropy["all tokens"], rel=1e-4)
    assert all(row["all tokens"] < 0.9 * before["all tokens"] for row in (gamma_0, *others))


def test_an_evaluation_finds_the_trained_adapter_better(run: Run) -> None:
    base, trained = run("evaluate.py", "--steps=24")
    assert trained["mean score"] > base["mean score"]
    assert trained["best of 8"] >= trained["mean score"]


def test_the_clock_shows_that_a_naive_loop_takes_one_more_cycle_per_step(
    base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    beat = ("--clock-mode=metronome", "--clock-period-s=0.5")
    picture = tmp_path / "clock.png"
    with Serving(tmp_path / "data", [str(base_model)], [KEY], beat) as serving:
        options = ("--steps=4", "--period-s=0.5", "--prepare-s=0", f"--picture={picture}")
        rows = run_at(serving.address, monkeypatch, capsys, "clock_cycles.py", *options)
    naive, submit_both, pipelined = (row["cycles per step"] for row in rows)
    assert naive >= 2  # on any machine: it never has both requests in one cycle
    assert submit_both < naive
    assert pipelined < naive
    assert picture.read_bytes().startswith(PNG)
