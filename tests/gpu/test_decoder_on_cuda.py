"""The decoder on CUDA; `bench engine_check` and `bench decode` print the figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine.decoding import expert_check, model_runner, page_kernel
from cotrain_workers.engine.decoding.requests import SampleOutput
from cotrain_workers.engine.decoding.step_experts import experts_of_step, units_of
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.lora.fused.operators import CLAMPED, SILU
from cotrain_workers.engine.lora.self_check import TOLERANCE
from cotrain_workers.engine.model.kernel_check import SIZES, WIDE_SIZES, RandomExperts, Tokens, random_tokens
from tests.support.decoding import finish, gap_to_trainer, graph_report, is_same_alone, output, request, trained_weights
from tests.support.page_problem import LENGTHS, Case, Rule, assert_dense, attend, problem, sequence
from tests.support.tiny_models import FAMILIES, build_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


CUDA = torch.device("cuda", 0)
HEADS = {128: (32, 8), 256: (8, 4), 96: (4, 4), 16: (7, 1)}
RULES = [Rule(), Rule(window=20), Rule(1100, 30.0)]


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return build_tiny(request.param, tmp_path)


def test_logprobs_are_the_trainers(folder: Path) -> None:
    engine = Engine.load(str(folder), device="cuda", dtype=torch.float32)

    assert gap_to_trainer(engine).largest < 5e-5


def test_logprobs_in_bf16_are_near_the_trainers(folder: Path) -> None:
    engine = Engine.load(str(folder), device="cuda")

    assert gap_to_trainer(engine).mean < 0.02


def test_a_seeded_request_gives_the_same_tokens_in_any_batch(folder: Path) -> None:
    assert is_same_alone(Engine.load(str(folder), device="cuda", dtype=torch.float32))


def test_graphs_are_used_and_agree_with_the_plain_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Pages, heads and widths that the flash kernel and the grouped products take.
    engine = Engine.load(str(build_tiny("qwen3", tmp_path, hidden=128)), device="cuda")
    weights = trained_weights(engine)
    mine = request("mine", np.arange(100), "all-8", num_samples=5, max_tokens=40)

    decoder = engine.decoder(weights.__getitem__, kv_tokens=8192, text=None)
    with_graphs = output(decoder, mine)
    report = graph_report(decoder)
    monkeypatch.setattr(model_runner, "kernel_takes", lambda *args: False)
    monkeypatch.setattr(model_runner, "groups_take", lambda *args: False)
    plain = output(engine.decoder(weights.__getitem__, kv_tokens=8192, text=None), mine)

    # One for each number of rows that occurs, and no reason against any.
    assert re.fullmatch(r"[1-9] in use", report), report
    gaps = [
        np.abs(one.logprobs - other.logprobs)[: same_prefix(one.tokens, other.tokens)]
        for one, other in zip(with_graphs.sequences, plain.sequences, strict=True)
    ]
    assert np.concatenate(gaps).mean() < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [SIZES, WIDE_SIZES, (2048, 768)])
@pytest.mark.parametrize("gate", [SILU, CLAMPED])
def test_kernels_of_experts_equal_the_loop(dtype: torch.dtype, sizes: tuple[int, int], gate: int) -> None:
    assert expert_check.difference(CUDA, dtype, sizes, gate) <= TOLERANCE[dtype]


def test_a_row_of_experts_has_the_same_bits_alone_and_among_others() -> None:
    module = RandomExperts((2048, 768), CUDA, torch.bfloat16, experts=8)
    adapters = expert_check.random_slots(module, expert_check.SPECS)
    slots = [([None, *adapters])[at * 7 % 5] for at in range(96)]
    tokens = random_tokens(module, len(slots))
    units = units_of(module.targets)

    def computed(rows: slice, *, is_prompt: bool) -> torch.Tensor:
        own = slots[rows]
        # Every second neighbour is of the other kind.
        kinds = [is_prompt if len(own) == 1 or at % 2 else not is_prompt for at in range(len(own))]
        kernels = experts_of_step(units, own, kinds, len(own), CUDA)
        return expert_check.run(module, Tokens(*(each[rows] for each in tokens)), own, kernels)

    for is_prompt in (False, True):
        together = computed(slice(None), is_prompt=is_prompt)
        for at in range(1, len(slots), 2):
            assert torch.equal(computed(slice(at, at + 1), is_prompt=is_prompt)[0], together[at]), (is_prompt, at)


def test_a_mixture_of_experts_decodes_in_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load(str(build_tiny("qwen3_moe", tmp_path, hidden=128)), device="cuda")
    weights = trained_weights(engine)
    mine = request("mine", np.arange(100), "all-8", num_samples=5, max_tokens=40, return_routed_experts=True)

    decoder = engine.decoder(weights.__getitem__, kv_tokens=8192, text=None)
    with_graphs = output(decoder, mine)
    report = graph_report(decoder)
    monkeypatch.setattr(model_runner, "fused_units", lambda _: {})
    plain = output(engine.decoder(weights.__getitem__, kv_tokens=8192, text=None), mine)

    assert re.fullmatch(r"[1-9] in use", report), report
    for one, other in zip(with_graphs.sequences, plain.sequences, strict=True):
        same = same_prefix(one.tokens, other.tokens)
        assert np.abs(one.logprobs - other.logprobs)[:same].mean() < 0.02
        assert one.routed_experts is not None
        assert one.routed_experts.shape[0] == len(one.tokens) - 1


def same_prefix(ours: np.ndarray, theirs: np.ndarray) -> int:
    """Return how many tokens two samples share from the start."""
    differ = np.flatnonzero(ours != theirs)
    return int(differ[0]) if len(differ) else len(ours)


def test_many_requests_finish_in_little_memory(tmp_path: Path) -> None:
    engine = Engine.load(str(build_tiny("qwen3", tmp_path)), device="cuda")
    weights = trained_weights(engine)
    keys = [None, *weights]
    decoder = engine.decoder(weights.__getitem__, kv_tokens=256 * 16, text=None)

    found = finish(
        decoder, [request(f"r{at}", np.arange(at % 90 + 1), keys[at % 8], max_tokens=60, seed=at) for at in range(100)]
    )

    assert len(found) == 100
    assert [each for each in found.values() if not isinstance(each, SampleOutput)] == []


def case(length: int, queries: int = 1, width: int = 128, dtype: torch.dtype = torch.bfloat16) -> Case:
    return sequence(length, queries, HEADS[width], width, dtype)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "width"),
    [*((torch.bfloat16, width) for width in HEADS), (torch.float16, 128), (torch.float32, 128), (torch.float32, 16)],
    ids=str,
)
def test_tokens_and_prompts_attend_over_pages(dtype: torch.dtype, width: int, rule: Rule) -> None:
    assert_dense([case(length, 1, width, dtype) for length in LENGTHS], rule, CUDA)
    prompts = [(1, 1), (64, 64), (1500, 150), (70, 5)]
    assert_dense([case(length, n, width, dtype) for length, n in prompts], rule, CUDA)


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_of_a_sequence_has_the_same_bits_in_any_batch(
    queries: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, rule = case(2100, queries, dtype=dtype), Rule(1900, 30.0)
    alone = attend([mine], rule, device=CUDA)[0]
    broken = case(1500, queries, dtype=dtype)
    broken.k.fill_(torch.nan)
    others = [case(length, queries, dtype=dtype) for length in range(50, 1100, 50)]

    for seed in range(3):
        found = attend([*others, mine, broken], rule, spare=9, seed=seed, device=CUDA)
        assert torch.equal(found[-2], alone)
        assert torch.equal(found[0], attend([others[0]], rule, device=CUDA)[0])
        assert found[-1].isnan().all()
    monkeypatch.setattr(page_kernel, "PROGRAMS", 1)
    assert torch.equal(attend([mine], rule, longest=20_000, device=CUDA)[0], alone)


def test_a_graph_of_attention_takes_other_lengths_and_pages() -> None:
    settings: dict[str, Any] = {"longest": 4096, "device": CUDA}
    one = problem([case(1025), case(17), case(2500)], Rule(), seed=0, **settings)
    two = problem([case(17), case(2500), case(1025)], Rule(), seed=1, **settings)
    page_kernel.attend(*two)
    expected = two.out.clone()
    page_kernel.attend(*one)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        page_kernel.attend(*one)

    for ours, theirs in zip(one, two, strict=True):
        if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
            ours.copy_(theirs)
    one.out.fill_(torch.nan)
    graph.replay()

    assert torch.equal(one.out, expected)
