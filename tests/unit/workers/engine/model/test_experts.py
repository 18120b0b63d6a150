"""One layer of experts: routes that leave experts empty, many adapters, and sizes of adapters."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from cotrain_workers.engine.lora.backend import BackendUnfit, find_backend
from cotrain_workers.engine.lora.fused.operators import CLAMPED, GELU, SILU
from cotrain_workers.engine.lora.segmented import SegmentLora
from cotrain_workers.engine.model.base_model import find_targets, make_skeleton
from cotrain_workers.engine.model.experts import (
    expert_targets,
    experts_by_adapter,
    gate_of,
    is_experts,
    rearrange,
    unfused,
)
from cotrain_workers.engine.routing import Segment
from cotrain_workers.engine.spec import AdapterSpec, lora_widths, plan_layout

EXPERTS, WIDTH, INNER = 5, 24, 16
ROUTES = {
    "one expert has all tokens": [[2]] * 40,
    "fewer pairs than experts": [[4, 0]],
    "experts are empty": [[1, 3]] * 70 + [[3, 1]],
    "each token has all experts": [[4, 2, 0, 1, 3]] * 3,
}


def layer(kind: str = "qwen3_moe") -> Any:
    """Return random eager experts in fp64, and the same ones as targets."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1}
    module: Any
    if kind == "gpt_oss":
        module = GptOssExperts(GptOssConfig(**sizes, intermediate_size=INNER, num_local_experts=EXPERTS))
    else:
        module = Qwen3MoeExperts(Qwen3MoeConfig(**sizes, moe_intermediate_size=INNER, num_experts=EXPERTS))
    module.config._experts_implementation = "eager"
    module.double().requires_grad_(requires_grad=False)
    for parameter in module.parameters():
        parameter.copy_(torch.randn_like(parameter) / 4)
    module.cotrain_name = "experts"
    return module


def segments_of(module: Any, ranks: Sequence[int], tokens: int) -> list[Segment]:
    """Return adapters with random matrices, each for an equal number of tokens."""
    found = []
    for at, rank in enumerate(ranks):
        layout = plan_layout(AdapterSpec(rank, 0, per_expert=at % 2 == 1), expert_targets("experts", module))
        arena = torch.randn(layout.size, dtype=torch.float64) / 4
        source: Any = SimpleNamespace(layout=layout, compute=layout.views(arena), arena=arena)
        grads = layout.views(torch.zeros_like(arena))
        found.append(Segment(at * tokens, (at + 1) * tokens, source, 2.0 / rank, grads))
    return found


def merged(module: Any, segment: Segment) -> Any:
    """Return eager experts with an adapter added to their weights."""
    plain = layer("gpt_oss" if module.is_transposed else "qwen3_moe")
    plain.load_state_dict(module.state_dict())
    for name, (a, b) in segment.source.compute.items():
        change = segment.scale * b @ a
        product = name.removeprefix("experts.")
        weight = plain.down_proj if product == "down_proj" else plain.gate_up_proj
        weight = weight.mT if module.is_transposed else weight
        half = weight.shape[1] // 2
        own = {
            "down_proj": slice(None),
            "gate_proj": slice(half) if module.is_concatenated else slice(0, None, 2),
            "up_proj": slice(half, None) if module.is_concatenated else slice(1, None, 2),
        }[product]
        weight[:, own] += change
    return plain


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_gives_the_values_of_eager_experts(kind: str, route: str) -> None:
    torch.manual_seed(0)
    module, index = layer(kind), torch.tensor(ROUTES[route])
    tokens = len(index)
    segments = segments_of(module, (3, 2), tokens)
    module.cotrain_router = SimpleNamespace(
        step=None, route=SimpleNamespace(lora=SegmentLora(segments), segments=segments)
    )
    x = torch.randn(3 * tokens, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3 * tokens, index.shape[1], dtype=torch.float64)
    index = index.repeat(3, 1)

    ours = experts_by_adapter(module, x, index, weights)
    ours.square().sum().backward()

    assert x.grad is not None
    given = x.detach().requires_grad_()
    plain = [*(merged(module, each) for each in segments), module]  # the last rows have no adapter
    thirds = [slice(at * tokens, (at + 1) * tokens) for at in range(3)]
    theirs = torch.cat([each(given[own], index[own], weights[own]) for each, own in zip(plain, thirds, strict=True)])
    theirs.square().sum().backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, given.grad, rtol=1e-12, atol=1e-12)


def test_there_is_no_limit_on_the_number_of_adapters_times_experts() -> None:
    torch.manual_seed(0)
    module, adapters = layer(), 1024
    segments = segments_of(module, [1] * adapters, 1)
    module.cotrain_router = SimpleNamespace(
        step=None, route=SimpleNamespace(lora=SegmentLora(segments), segments=segments)
    )
    x = torch.randn(adapters, WIDTH, dtype=torch.float64, requires_grad=True)
    index = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(adapters)])
    weights = torch.rand(adapters, 2, dtype=torch.float64)

    ours = experts_by_adapter(module, x, index, weights)
    ours.square().sum().backward()

    assert x.grad is not None
    for at in (0, 511, 1023):
        own = slice(at, at + 1)
        given = x.detach()[own].requires_grad_()
        theirs = merged(module, segments[at])(given, index[own], weights[own])
        theirs.square().sum().backward()
        torch.testing.assert_close(ours[own], theirs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(x.grad[own], given.grad, rtol=1e-12, atol=1e-12)


def test_adapters_of_experts_have_the_sizes_of_tinker() -> None:
    """Its tables give 14,450,688 values per rank for Qwen3-30B-A3B, and 6,842,880 for gpt-oss-20b."""
    config = Qwen3MoeConfig(
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        moe_intermediate_size=768,
        num_experts=128,
    )
    widths = lora_widths(find_targets(make_skeleton(config)))
    assert widths["mlp"] == 14_450_688
    assert widths["mlp"] + widths["experts"] == 48 * 128 * 3 * (2048 + 768)

    with torch.device("meta"):
        oss = GptOssExperts(GptOssConfig(hidden_size=2880, intermediate_size=2880, num_local_experts=32))
    assert 24 * lora_widths(expert_targets("experts", oss))["mlp"] == 6_842_880


def test_a_device_without_kernels_of_experts_gets_the_loop() -> None:
    targets = expert_targets("experts", layer())
    on_cuda: Any = SimpleNamespace(is_cuda=True, device=torch.device("cpu"), dtype=torch.bfloat16)
    module = layer()
    module.act_fn = torch.nn.ReLU()
    reason = unfused(module)
    assert reason == "the gate of its experts has no kernel"
    found = find_backend("auto", targets, on_cuda, unfused_experts=reason)
    assert found.name == "seg"
    assert found.fallback_reason == f"not fused: {reason}"
    with pytest.raises(BackendUnfit, match="'fused' cannot be used: the gate of its experts"):
        find_backend("fused", targets, torch.zeros(1), unfused_experts=reason)


def test_the_gate_of_experts_is_known_by_its_values() -> None:
    module = layer()
    assert (unfused(module), gate_of(module)) == ("", SILU)
    module.act_fn = torch.nn.GELU("tanh")
    assert gate_of(module) == GELU
    module.act_fn = torch.nn.ReLU()
    assert unfused(module) == "the gate of its experts has no kernel"
    oss = layer("gpt_oss")
    assert (unfused(oss), gate_of(oss)) == ("", CLAMPED)
    oss.limit = 6.0
    assert unfused(oss) == "the gate of its experts has no kernel"


def test_rearranged_experts_give_the_same_values() -> None:
    torch.manual_seed(0)
    module = layer("gpt_oss")
    targets = expert_targets("experts", module)
    segments = segments_of(module, (3,), 8)
    router = SimpleNamespace(step=None, route=SimpleNamespace(lora=SegmentLora(segments), segments=segments))
    module.cotrain_router = router
    x, index = torch.randn(8, WIDTH, dtype=torch.float64), torch.tensor([[2, 0]] * 8)
    weights = torch.rand(8, 2, dtype=torch.float64)
    expected = experts_by_adapter(module, x, index, weights)

    rearrange(module)

    assert module.gate_up_proj.shape == (EXPERTS, 2 * INNER, WIDTH)
    assert not module.is_transposed
    torch.testing.assert_close(experts_by_adapter(module, x, index, weights), expected, rtol=1e-12, atol=1e-12)
    assert expert_targets("experts", module) == targets  # files keep the order of the model
    assert gate_of(module) == CLAMPED


def test_experts_of_an_older_transformers_are_found() -> None:
    # Transformers 5.17 sets this attribute, but not all of those of later versions.
    module: Any = torch.nn.Module()
    module.gate_up_proj = torch.nn.Parameter(torch.empty(2, 8, 4))
    assert not is_experts(module)
    module.is_concatenated = True

    assert is_experts(module)
