"""Self-check of an engine in use: it passes, finds planted leaks, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest
import torch

from cotrain_workers.engine.coordination import Yielding, run_to_end
from cotrain_workers.engine.decoding import step
from cotrain_workers.engine.decoding.requests import SampleOutput, SampleRequest
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.lora.segmented import SegmentLora
from cotrain_workers.engine.ops import Failure, HostWeights
from cotrain_workers.worker import self_check
from cotrain_workers.worker.self_check import MixCheck, check_mix
from tests.support.tiny_models import build_tiny_qwen3


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine.load(str(build_tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny")))


def checked(engine: Engine) -> MixCheck:
    def probe(
        requests: Sequence[SampleRequest], weights: Mapping[str, HostWeights]
    ) -> Yielding[dict[str, SampleOutput | Failure | None]]:
        decoder = engine.decoder(weights.__getitem__, kv_tokens=1024, text=None)
        outputs: dict[str, SampleOutput | Failure | None] = {}
        for request in requests:
            decoder.add(request)
        while decoder.busy:
            outputs |= decoder.step().finished
            yield
        return outputs

    return run_to_end(check_mix(engine, probe))


def test_a_sound_engine_passes_to_the_bit_and_keeps_no_adapter(engine: Engine) -> None:
    found = checked(engine)
    same = {"logprobs": 0.0, "gradients": 0.0, "weights": 0.0, "samples": 0.0, "tolerance": 0.0}
    assert asdict(found) == {**same, "runs": 6, "tokens": 748, "problem": ""}
    assert sum(count for count, _ in engine.adapters.by_tier.values()) == 0


def test_a_delta_that_reaches_the_rows_of_another_adapter_is_found(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = SegmentLora.linear

    def leaking(self: Any, module: str, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = sound(self, module, x, *rest)
        segments: Sequence[Any] = self._segments
        first = segments[0][1].get(module)
        if len(segments) > 1 and first is not None:
            rows = slice(segments[1][0].start, segments[1][0].stop)
            leak = torch.zeros_like(out)
            leak[:, rows] = 1e-4 * (x[:, rows] @ first.a.mT) @ first.b.mT
            out = out + leak
        return out

    monkeypatch.setattr(SegmentLora, "linear", leaking)
    found = checked(engine)
    assert found.problem.startswith("The ")
    assert "in a mix differ from those alone by" in found.problem
    assert found.logprobs > 0
    assert found.gradients > 0
    assert found.runs == 6


def test_a_sample_with_the_adapter_of_a_neighbour_is_found(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = step.adapter_rows

    def off_by_one(slots: Sequence[Any]) -> list[step.AdapterRows]:
        found = list(sound(slots))
        return [*found[:1], *(b._replace(slot=a.slot) for a, b in pairwise(found))]

    monkeypatch.setattr(step, "adapter_rows", off_by_one)
    found = checked(engine)
    assert found.problem.startswith("The samples of self-check:")
    assert found.samples
    assert (found.logprobs, found.gradients, found.weights) == (0, 0, 0)


def test_a_pass_that_fails_is_the_problem_and_adapters_are_dropped_after_an_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "SCALE_B", float("nan"))
    assert "failed: " in checked(engine).problem
    monkeypatch.setattr(self_check, "_run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checked(engine)
    assert sum(count for count, _ in engine.adapters.by_tier.values()) == 0
