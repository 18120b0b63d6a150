from __future__ import annotations

import numpy as np
import pytest
import torch

from cotrain_workers.engine.ops import PassOutput
from tests.support.draws import variant
from tests.support.engine_checks import bf16_gradient_cosine, warmed_up
from tests.support.training import MIX, ModelFolder


@pytest.mark.parametrize("family", ["gemma3", "phi3", "qwen3", *map(variant, ("gemma", "gemma2", "granite", "qwen2"))])
def test_gradients_on_a_bf16_base_have_the_direction_of_those_on_fp32(model_folder: ModelFolder, family: str) -> None:
    assert bf16_gradient_cosine(model_folder(family), "cpu", "seg") > 0.999


def test_a_bf16_base_has_fp32_adapters_and_results(model_folder: ModelFolder) -> None:
    engine = warmed_up(model_folder("qwen3"), "cpu", torch.bfloat16)

    for tenant in MIX:
        state = engine.adapters.state(tenant.run)
        assert {t.dtype for t in (state.weights, state.grads, state.m, state.v)} == {torch.float32}
    output = engine.run(MIX[0].ops(1)).outputs[MIX[0].run, 6]
    assert isinstance(output, PassOutput)
    assert {lp.dtype for lp in output.logprobs} == {np.dtype(np.float32)}
