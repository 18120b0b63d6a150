"""CUDA parts of a decoder step on a CPU, with plain code in place of the kernel and the graphs.

The kernels themselves are tested in `tests/gpu`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine.decoding import lora_kernel, model_runner, page_kernel
from cotrain_workers.engine.decoding.adapter_slots import WeightSlots
from cotrain_workers.engine.decoding.decoder import EngineDecoder
from cotrain_workers.engine.decoding.lora_kernel import KernelLora, lora_kernel_takes, lora_tables, siblings_of
from cotrain_workers.engine.decoding.model_runner import CudaRecorder, Inputs
from cotrain_workers.engine.decoding.page_kernel import PagesCall, kernel_takes
from cotrain_workers.engine.decoding.requests import SampleOutput, SampleRequest
from cotrain_workers.engine.decoding.step import RowLora, slot_order
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.lora.quantized import Quantization
from cotrain_workers.engine.model.families import UNEMBED
from cotrain_workers.engine.ops import Failure, HostWeights
from cotrain_workers.engine.spec import AdapterSpec, plan_layout
from tests.support.decoding import finish, graph_report, output, request, trained_weights
from tests.support.draws import variant
from tests.support.plain_lora import plain_expand, plain_shrink
from tests.support.plain_pages import plain_pages
from tests.support.training import MIX, ModelFolder, NewEngine

Outputs = Mapping[str, SampleOutput | Failure]

RUNS = [tenant.run for tenant in MIX]
CPU = torch.device("cpu")
DUMP, PAGE, ROWS, PAGES = 99, 16, 4, 3


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a decoder on CPU take every decision as on CUDA."""
    monkeypatch.setattr(model_runner, "kernel_takes", lambda *args: True)
    monkeypatch.setattr(model_runner, "lora_kernel_takes", lambda *args: True)
    monkeypatch.setattr(lora_kernel, "shrink", plain_shrink)
    monkeypatch.setattr(lora_kernel, "expand", plain_expand)
    monkeypatch.setattr(model_runner, "CudaRecorder", lambda: repeat)
    monkeypatch.setattr(page_kernel, "attend", plain_pages)


def repeat(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Record `work` as a CUDA graph would: each replay uses the inputs of that moment."""
    output = torch.full_like(work(), torch.nan)

    def replay() -> None:
        output.copy_(work())

    return replay, output


def requests() -> list[SampleRequest]:
    """Return requests with mixed prompts and adapters, some with the base model alone."""
    return [
        request(
            f"r{at}",
            np.random.default_rng(at).integers(0, 128, 1 + 9 * at),
            [None, *RUNS][at % 8],
            temperature=0.0,
            max_tokens=5 + at,
            num_samples=1 + at % 2,
            prompt_logprobs=True,
        )
        for at in range(10)
    ]


def decoder_of(engine: Engine, weights: Mapping[str, HostWeights]) -> EngineDecoder:
    return engine.decoder(weights.__getitem__, kv_tokens=2048, text=None, page_tokens=16)


def assert_close(ours: Outputs, theirs: Outputs) -> None:
    """Check that tokens are equal, and log-probabilities equal up to rounding."""
    for name, expected in theirs.items():
        found = ours[name]
        assert isinstance(found, SampleOutput)
        assert isinstance(expected, SampleOutput)
        assert found.prompt_logprobs is not None
        assert expected.prompt_logprobs is not None
        pairs = zip(found.sequences, expected.sequences, strict=True)
        for one, other in pairs:
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        np.testing.assert_allclose(found.prompt_logprobs, expected.prompt_logprobs, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        variant("qwen3", "none"),
        variant("mistral", "none"),
        variant("qwen3_5", "none"),
        variant("qwen3", "int8"),
        ("gemma2", "none"),
    ],
)
def test_the_cuda_parts_give_the_results_of_the_plain_parts(
    model_folder: ModelFolder, family: str, quantization: Quantization, request: pytest.FixtureRequest
) -> None:
    engine = Engine.load(str(model_folder(family)), quantization=quantization)
    weights = trained_weights(engine)
    plain = finish(decoder_of(engine, weights), requests())
    request.getfixturevalue("as_on_cuda")
    decoder = decoder_of(engine, weights)

    found = finish(decoder, requests())
    assert_close(found, plain)
    graphs = decoder.runner.graphs
    assert (graphs is None) == (family == "qwen3_5")  # its states are in no graph
    assert graphs is None or (graphs.used >= 3 and not graphs.refused)


@pytest.mark.usefixtures("as_on_cuda")
def test_a_graph_runs_any_adapters_in_slots_that_move(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[int] = []

    def record(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        captures.append(1)
        return repeat(work)

    monkeypatch.setattr(model_runner, "CudaRecorder", lambda: record)
    engine = new_engine()
    weights = trained_weights(engine)
    decoder = decoder_of(engine, weights)
    for runs in (["all-8", None], ["attn-1", "head-16"], ["all-5", "mlp-4"], ["all-8", "head-16"]):
        asked = [request(str(run), [1, 2], run, max_tokens=6, temperature=0.0) for run in runs]
        alone = {each.id: output(decoder_of(engine, weights), each) for each in asked}
        captures.clear()
        for name, found in finish(decoder, asked).items():
            assert isinstance(found, SampleOutput)
            (one,), (other,) = found.sequences, alone[name].sequences
            np.testing.assert_array_equal(one.tokens, other.tokens)
        assert len(captures) == (runs == ["all-8", None])

    # An adapter of a larger rank than the graphs take: they are recorded again.
    spec = AdapterSpec(130, seed=9)
    weights["large"] = HostWeights(spec, torch.randn(plan_layout(spec, engine.targets).size) / 50)
    finish(decoder, [request(str(at), [1, 2], run, max_tokens=6) for at, run in enumerate(["large", "all-8"])])
    assert len(captures) == 1


@pytest.mark.usefixtures("as_on_cuda")
def test_a_graph_capture_is_limited_to_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Graph:
        def replay(self) -> None: ...

    @contextmanager
    def graph(_: Graph, **settings: Any) -> Iterator[None]:
        seen.update(settings)
        yield

    stream = SimpleNamespace(wait_stream=lambda other: None)
    played = {
        "graph_pool_handle": lambda: None,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda _: nullcontext(),
        "CUDAGraph": Graph,
        "graph": graph,
    }
    for name, value in played.items():
        monkeypatch.setattr(torch.cuda, name, value)

    CudaRecorder()(lambda: torch.zeros(1))

    assert seen["capture_error_mode"] == "thread_local"


@pytest.mark.usefixtures("as_on_cuda")
def test_a_graph_with_different_results_is_not_used(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    expected = finish(decoder_of(engine, weights), requests())

    def wrong(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        output = work() * 1.5
        return (lambda: None), output

    monkeypatch.setattr(model_runner, "CudaRecorder", lambda: wrong)
    decoder = decoder_of(engine, weights)
    found = finish(decoder, requests())

    assert_close(found, expected)
    assert graph_report(decoder).startswith("0 in use; 16 rows: hidden states differ by")


@pytest.mark.usefixtures("as_on_cuda")
def test_a_graph_that_cannot_be_captured_is_not_used(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(model_runner, "CudaRecorder", lambda: fails)
    engine = new_engine()
    decoder = decoder_of(engine, trained_weights(engine))
    found = finish(decoder, requests())

    assert len(found) == 10
    assert graph_report(decoder).startswith("0 in use; 16 rows: operation not permitted when")


@pytest.mark.parametrize("is_on_cuda", [False, True])
def test_dropping_a_decoder_frees_its_memory_at_once(
    new_engine: NewEngine, request: pytest.FixtureRequest, is_on_cuda: bool
) -> None:
    if is_on_cuda:
        request.getfixturevalue("as_on_cuda")
    engine = new_engine()
    weights = trained_weights(engine)
    decoder = decoder_of(engine, weights)
    for each in requests():
        decoder.add(each)
    for _ in range(4):
        decoder.step()
    memory = weakref.ref(decoder._cache)

    gc.disable()
    try:
        del decoder
        assert memory() is None
    finally:
        gc.enable()


def test_without_a_gpu_there_are_no_graphs(new_engine: NewEngine) -> None:
    assert graph_report(decoder_of(new_engine(), {})) == "none: the plain steps run"


def test_kernel_lora_equals_row_lora(as_on_cuda: None, new_engine: NewEngine) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    slots = WeightSlots(engine._base.targets, CPU, torch.float32, weights.__getitem__, limit_bytes=None)
    pinned = sorted((slots.pin(run) for run in RUNS), key=slot_order)
    rows = [None, None, *(slot for slot in pinned for _ in range(3))]
    siblings = {target.name: own for own in siblings_of(engine._base.targets) for target in own.targets}
    linears: dict[str, Any] = {
        target.name: SimpleNamespace(
            weight=torch.randn(target.outputs, target.inputs) / 8, bias=torch.randn(target.outputs)
        )
        for target in engine._base.targets
    }
    lora = KernelLora(siblings, linears, lora_tables(rows, CPU))
    plain, xs = RowLora(rows, CPU), dict[int, torch.Tensor]()
    for target in engine._base.targets[-8:-1]:
        x = xs.setdefault(target.inputs, torch.randn(1, 32, target.inputs))
        module = linears[target.name]

        ours, theirs = (each.linear(target.name, x, module.weight, module.bias) for each in (lora, plain))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

        if target.name.endswith("down_proj"):  # without siblings
            given = target.name, x, module.weight, module.bias
            residual = torch.randn(1, 32, target.outputs)
            ours, theirs = (each.linear(*given, residual.clone()) for each in (lora, plain))
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(ours, plain.linear(*given) + residual, rtol=1e-5, atol=1e-5)
    x, ours, theirs = torch.randn(32, 64), torch.zeros(32, 128), torch.zeros(32, 128)
    lora.add(UNEMBED, x, ours)
    plain.add(UNEMBED, x, theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert ours.abs().max() > 0


def test_a_lora_kernel_with_wrong_results_is_not_used(
    new_engine: NewEngine, as_on_cuda: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def loses_a_part(*args: Any) -> torch.Tensor:
        return plain_shrink(*args) * 0.9

    def cannot(*args: Any) -> torch.Tensor:
        raise RuntimeError("no such instruction")

    engine = new_engine()
    for kernel, reason in ((loses_a_part, "is off by"), (cannot, "no such instruction")):
        caplog.clear()
        monkeypatch.setattr(lora_kernel, "shrink", kernel)
        decoder = decoder_of(engine, trained_weights(engine))
        assert graph_report(decoder) == "none: the plain steps run"
        assert isinstance(decoder.runner._lora([]), RowLora)
        assert "The LoRA kernel of decoding, without which decoding is slow," in caplog.text
        assert reason in caplog.text


def test_a_kernel_over_pages_with_wrong_results_is_not_used(
    new_engine: NewEngine, as_on_cuda: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forgets_the_window(*args: Any) -> None:
        plain_pages(*PagesCall(*args)._replace(window=None))

    def loses_a_token_key(*args: Any) -> None:
        call = PagesCall(*args)
        lost = (call.lengths > 1000) & (call.queries == 1)
        plain_pages(*call._replace(lengths=call.lengths - lost.int()))

    def loses_a_prompt_key(*args: Any) -> None:
        call = PagesCall(*args)
        lost = (call.lengths > 16) & (call.queries > 1)
        plain_pages(*call._replace(lengths=call.lengths - lost.int()))

    def cannot(*args: Any) -> None:
        raise RuntimeError("page size")

    engine = new_engine()
    assert graph_report(decoder_of(engine, {})) == "0 in use"
    assert not caplog.records
    for kernel, reason in (
        (forgets_the_window, "is off by"),
        (loses_a_token_key, "is off by"),
        (loses_a_prompt_key, "is off by"),
        (cannot, "page size"),
    ):
        caplog.clear()
        monkeypatch.setattr(page_kernel, "attend", kernel)
        assert graph_report(decoder_of(engine, {})) == "none: the plain steps run"
        assert reason in caplog.text


@pytest.mark.parametrize(
    ("dtype", "head_dim", "page_tokens", "reason"),
    [
        (torch.float64, 64, 256, "no kernel for torch.float64"),
        (torch.bfloat16, 40, 256, "no kernel for heads of 40 values"),
        (torch.bfloat16, 64, 24, "no kernel for pages of 24 tokens"),
    ],
)
def test_the_reason_against_the_kernel_over_pages_is_logged(
    caplog: pytest.LogCaptureFixture, dtype: torch.dtype, head_dim: int, page_tokens: int, reason: str
) -> None:
    weight: Any = SimpleNamespace(is_cuda=True, dtype=dtype, device=torch.device("cuda"))

    assert not kernel_takes(weight, head_dim, page_tokens)
    assert f"Decoding is slow here: {reason}" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [(torch.float64, "no kernels for torch.float64"), (torch.bfloat16, "triton is not installed")],
)
def test_the_reason_against_the_lora_kernel_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dtype: torch.dtype, reason: str
) -> None:
    monkeypatch.setattr(lora_kernel, "missing_kernels", lambda _: "triton is not installed")
    weight: Any = SimpleNamespace(is_cuda=True, dtype=dtype, device=torch.device("cuda"))

    assert not lora_kernel_takes(weight)
    assert f"LoRA in decoding is slow here: {reason}" in caplog.text


def row(position: int, pages: Sequence[int], token: int) -> Any:
    """Return a row for a token at a position, of the base model alone."""
    sequence = SimpleNamespace(token=lambda _: token)
    span = SimpleNamespace(start=position, pages=pages)
    return SimpleNamespace(work=SimpleNamespace(sequence=sequence), span=span, slot=None)


def test_fixed_inputs_keep_nothing_of_an_earlier_step() -> None:
    cache: Any = SimpleNamespace(page_tokens=PAGE, dump=DUMP, device=CPU)
    used, fresh = (Inputs(ROWS, PAGES, 16, cache) for _ in range(2))
    shared = [4, 5]
    used.fill([row(40, [1, 2, 3], 7), row(20, shared, 8), row(0, [6], 9)], None)
    shared[1] = 8  # in place, as when a shared page is copied

    step = [row(20, shared, 10), row(33, [1, 2, 9], 11)]
    for each in (used, fresh):
        each.fill(step, None)

    for of_used, of_fresh in (
        (used.ids, fresh.ids),
        (used.positions, fresh.positions),
        (used.tables.kv_slots, fresh.tables.kv_slots),
        (used.tables.pages, fresh.tables.pages),
    ):
        assert torch.equal(of_used, of_fresh)
    assert used.ids.tolist() == [[10, 11, 0, 0]]
    assert used.positions.tolist() == [[20, 33, 0, 0]]
    assert used.tables.kv_slots.tolist() == [8 * PAGE + 4, 9 * PAGE + 1, DUMP * PAGE, DUMP * PAGE + 1]
    (blocks,) = used.tables.launches
    assert blocks.lengths.tolist() == [21, 34, 1, 1]
    none = [DUMP] * PAGES
    assert used.tables.pages.tolist() == [[4, 8, DUMP], [1, 2, 9], none, none]
