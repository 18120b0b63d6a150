"""The first two minutes on a GPU: does each fast path run, and is it right? All is tiny.

What fails here is slow, or wrong, everywhere else: its name says which path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from cotrain_workers.engine.decoding.lora_kernel import lora_kernel_is_right
from cotrain_workers.engine.decoding.page_kernel import kernel_is_right
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.lora.backend import unfused
from cotrain_workers.engine.model.attention import flash_in_use, needs_copies, varlen_is_right
from cotrain_workers.engine.model.configuration import KvShape
from cotrain_workers.engine.ops import Failure, HostWeights, Save, SaveOutput
from cotrain_workers.engine.routing import AttentionRule
from cotrain_workers.engine.spec import Target
from tests.support.decoding import graph_report, output, request
from tests.support.tiny_models import build_tiny
from tests.support.training import MIX

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = build_tiny("qwen3", tmp_path_factory.mktemp("model"), hidden=128)
    return Engine.load(str(folder), device="cuda", micro_batch_tokens=256, recompute="never")


@pytest.fixture(scope="module")
def weights(engine: Engine) -> Mapping[str, HostWeights]:
    done = engine.run([op for tenant in MIX for op in tenant.ops(0)])
    assert not [each for each in done.outputs.values() if isinstance(each, Failure)]
    saved = engine.run([Save(tenant.run, 5) for tenant in MIX]).outputs
    return {run: each.weights for (run, _), each in saved.items() if isinstance(each, SaveOutput)}


@pytest.mark.parametrize("window", [None, 512])
def test_flash_attention_trains_the_heads_of_an_8b_model(window: int | None) -> None:
    print(torch.__version__, torch.cuda.get_device_name(CUDA), flash_in_use())
    rule = AttentionRule(128**-0.5, window, None)

    assert varlen_is_right(CUDA, torch.bfloat16, (32, 8, 128), rule)


@pytest.mark.parametrize("window", [None, 512])
def test_flash_attention_copies_no_keys_and_values(window: int | None) -> None:
    rule = AttentionRule(128**-0.5, window, None)

    assert not needs_copies(CUDA, torch.bfloat16, (32, 8, 128), rule, flash_in_use())


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_a_kernel_decodes_over_pages(softcap: float | None) -> None:
    assert kernel_is_right(KvShape(1, 8, 128), 32, 256, CUDA, torch.bfloat16, softcap)


def test_a_kernel_adds_lora_to_the_modules_of_an_8b_model() -> None:
    attention = [
        Target(f"0.self_attn.{name}_proj", "attn", 4096, size) for name, size in (("q", 4096), ("k", 1024), ("v", 1024))
    ]
    mlp = [Target(f"0.mlp.{name}_proj", "mlp", 4096, 12_288) for name in ("gate", "up")]
    down = Target("0.mlp.down_proj", "mlp", 12_288, 4096)

    assert lora_kernel_is_right([*attention, *mlp, down], CUDA, torch.bfloat16)


def test_lora_is_fused_with_the_base_models_products() -> None:
    assert unfused(torch.zeros(1, device=CUDA, dtype=torch.bfloat16)) is None


def test_layers_have_kernels(engine: Engine) -> None:
    assert engine.facts.numerics.fused == "norms heads mlp residuals softmax"


def test_adapters_of_every_rank_train_in_one_cycle(weights: Mapping[str, HostWeights]) -> None:
    assert len(weights) == len(MIX)
    assert all(bool(torch.isfinite(each.flat).all()) for each in weights.values())


def test_a_sampler_takes_its_weights_from_the_device(weights: Mapping[str, HostWeights]) -> None:
    for each in weights.values():
        found = each.on_device()
        assert found is not None
        assert torch.equal(found.cpu(), each.flat)


def test_a_decode_step_is_a_graph(engine: Engine, weights: Mapping[str, HostWeights]) -> None:
    decoder = engine.decoder(weights.__getitem__, kv_tokens=8192, text=None)

    output(decoder, request("mine", np.arange(100), "all-8", num_samples=5, max_tokens=40))

    # One for each number of rows that occurs, and no reason against any.
    assert re.fullmatch(r"[1-9] in use", graph_report(decoder)), graph_report(decoder)
