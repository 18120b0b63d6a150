"""CUDA branches of the engine, on a simulated device (`tests/support/rehearsed_cuda.py`).

Only a real device tests the kernels themselves, streams, the compiler, and the speed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine.adapters.bank import AdapterBank
from cotrain_workers.engine.decoding import expert_check, model_runner
from cotrain_workers.engine.decoding.decoder import EngineDecoder
from cotrain_workers.engine.decoding.requests import SampleOutput
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.model import attention
from cotrain_workers.engine.model.activation_checkpointing import RecomputePolicy
from cotrain_workers.engine.ops import CycleOutput, Failure, HostWeights, Op, ReverseKl, Save, SaveOutput
from cotrain_workers.engine.spec import AdapterSpec, Target
from cotrain_workers.engine.training import batch_runner, memory_model
from cotrain_workers.engine.training.forward_backward import ForwardBackward
from cotrain_workers.engine.training.memory_model import MAX_TOKENS
from tests.support.decoding import finish, graph_report, request
from tests.support.kl import kl_datums, random_weights, started
from tests.support.rehearsed_cuda import Rehearsal, rehearsed_cuda
from tests.support.rehearsed_tensor import DEVICE, WouldWait
from tests.support.training import MIX, ModelFolder

SOME = (MIX[3], MIX[4], MIX[5])  # ranks 5 to 16, the unembedding alone and left out, three columns


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rehearsal]:
    with rehearsed_cuda(monkeypatch) as play:
        yield play


def load(folder: Path, **settings: Any) -> Engine:
    given = {"fusion": False, "micro_batch_tokens": 128, "recompute": "never", **settings}
    return Engine.load(str(folder), device="cuda:0", **given)


def ops(cycle: int) -> list[Op]:
    return [op for tenant in SOME for op in tenant.ops(cycle)]


def succeeded(done: CycleOutput) -> CycleOutput:
    failures = [out.message for out in done.outputs.values() if isinstance(out, Failure)]
    assert not failures
    return done


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {"lora_backend": "seg"}),
        pytest.param("mistral", {"lora_backend": "seg", "recompute": "always"}, marks=pytest.mark.variants),
        pytest.param("qwen3_5", {"lora_backend": "seg"}, marks=pytest.mark.variants),
    ],
)
def test_a_cycle_equals_that_of_a_cpu_in_direction_and_waits_twice(
    cuda: Rehearsal, model_folder: ModelFolder, family: str, settings: dict[str, Any]
) -> None:
    folder = model_folder(family, layers=2 if family == "qwen3_5" else 1)  # of both kinds of attention
    engine = load(folder, **settings)
    plain = Engine.load(str(folder), dtype=torch.bfloat16)
    succeeded(engine.run(SOME[0].ops(0)))
    succeeded(plain.run(ops(0)))
    for tenant in SOME:
        engine.adapters.restore(tenant.run, plain.adapters.state(tenant.run))
    cuda.waits.clear()

    for each in (engine, plain):
        succeeded(each.run(ops(1)))

    # The results of the passes, and the norms of the gradients. Every copy goes through pinned memory.
    assert cuda.waits == ["copy to cpu", "copy to cpu"]
    for tenant in SOME:
        ours, theirs = engine.adapters.state(tenant.run), plain.adapters.state(tenant.run)
        assert torch.cosine_similarity(ours.m, theirs.m, dim=0) > 0.99, tenant.run
        assert ours.step == theirs.step == 2


def test_gemma_2_trains_without_a_flash_kernel_and_logs_a_warning(
    cuda: Rehearsal, model_folder: ModelFolder, caplog: pytest.LogCaptureFixture
) -> None:
    attention.varlen_is_right.cache_clear()
    attention.warn_slow.cache_clear()

    succeeded(load(model_folder("gemma2")).run(ops(0)))

    assert caplog.text.count("Attention is slow here") == 1
    assert cuda.ops["torch_attn._varlen_attn"] == 0


def test_index_copy_sorts_only_with_deterministic_algorithms(cuda: Rehearsal, model_folder: ModelFolder) -> None:
    load(model_folder("qwen3", layers=1), lora_backend="seg")
    indices, rows = torch.arange(3).pin_memory(), torch.zeros(8, 2, device=DEVICE)

    rows.index_copy_(0, indices.to(DEVICE, non_blocking=True), torch.ones(3, 2, device=DEVICE))

    assert torch.are_deterministic_algorithms_enabled()
    assert cuda.waits[-1] == "aten.index_copy_, sorted"


def test_a_reverse_kl_does_not_wait_for_the_device(cuda: Rehearsal, model_folder: ModelFolder) -> None:
    engine = started(load(model_folder("qwen3", layers=1)))
    reference = random_weights(AdapterSpec(3, seed=21), engine.adapters.layout_of)
    cuda.waits.clear()

    succeeded(engine.run([ReverseKl("a", 1, kl_datums(0), reference, 0.8)]))

    assert cuda.waits == ["copy to cpu"]


def test_sizes_are_measured(cuda: Rehearsal, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_model, "FIRST_LENGTH", 64)
    sizes = {"micro_batch_tokens": "auto", "recompute": "auto", "head_chunk_rows": 64}

    engine = load(model_folder("qwen3", layers=1), **sizes)

    assert engine.facts.numerics.micro_batch_tokens == MAX_TOKENS


def test_sequences_of_any_length_fit_into_the_measured_memory(
    cuda: Rehearsal, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (memory_model, batch_runner):
        monkeypatch.setattr(module, "CHUNK_ROWS", 32)
    engine = load(model_folder("qwen3", layers=1))
    base, lora = engine._base, engine._forward_backward._runner._lora
    passes = partial(ForwardBackward, base, lora, head_chunk_rows=32)
    bank = AdapterBank(base.targets, DEVICE, torch.bfloat16)
    peak = partial(memory_model.cuda_peak, DEVICE)

    found = memory_model.measure(base, passes, bank, peak)

    choices: dict[RecomputePolicy, Any] = {"never": found.kept, "always": found.recomputed}
    for (choice, model), length in product(choices.items(), (256, 32)):
        sizes = {"length": length, "tokens": 256, "vocab": base.vocab_size}
        used = peak(partial(memory_model.probe, passes, bank, choice, **sizes))
        assert used is not None
        assert used <= 1.02 * model.bytes_of(256), length

    saving = found.saving
    assert saving is not None
    cuda.waits.clear()
    sizes = {"length": 256, "tokens": 256, "vocab": base.vocab_size, "saves": True}
    used = peak(partial(memory_model.probe, passes, bank, "always", **sizes))
    assert used is not None
    assert used <= 1.02 * saving.bytes_of(256)
    assert cuda.waits == ["synchronize", "copy to cuda", "copy to cpu"]  # none for an input


def repeat(cuda: Rehearsal) -> Callable[..., Any]:
    """Return a stand-in for the recorder of CUDA graphs. No wait is allowed during a capture."""

    def record(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        work()
        cuda.mode = "error"
        try:
            output = work()
        finally:
            cuda.mode = "default"
        return lambda: output.copy_(work()), output  # type: ignore[return-value]

    return record


@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.variants), "gemma2"])
def test_a_decoder_step_is_captured_and_samples_as_on_a_cpu(
    cuda: Rehearsal, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(model_runner, "CudaRecorder", lambda: repeat(cuda))
    # Tensors that wrap others cannot be viewed in inference mode.
    step = inspect.unwrap(EngineDecoder.step)
    monkeypatch.setattr(EngineDecoder, "step", torch.no_grad()(step))
    folder = model_folder(family)
    engine = load(folder)
    plain = Engine.load(str(folder), dtype=torch.bfloat16)
    succeeded(plain.run(ops(0)))
    saved = {tenant.run: plain.run([Save(tenant.run, 5)]).outputs[tenant.run, 5] for tenant in SOME}
    weights = {run: out.weights for run, out in saved.items() if isinstance(out, SaveOutput)}
    asked = [
        request(str(at), np.arange(1 + 40 * at), run, temperature=0.0, max_tokens=4)
        for at, run in enumerate([None, "head-16", "soft-8", "all-5"])
    ]
    decoders = [each.decoder(weights.__getitem__, kv_tokens=2048, text=None) for each in (engine, plain)]

    ours, theirs = (finish(decoder, asked) for decoder in decoders)

    assert graph_report(decoders[0]) == "1 in use"
    for name, expected in theirs.items():
        found = ours[name]
        assert isinstance(found, SampleOutput)
        assert isinstance(expected, SampleOutput)
        pair = zip(found.sequences, expected.sequences, strict=True)
        for one, other in pair:  # the first token may be a near tie, so log-probabilities are compared
            assert abs(one.logprobs[0] - other.logprobs[0]) < 0.05


def test_decoding_continues_without_a_wait(
    cuda: Rehearsal, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "CudaRecorder", lambda: repeat(cuda))
    step = inspect.unwrap(EngineDecoder.step)
    monkeypatch.setattr(EngineDecoder, "step", torch.no_grad()(step))
    engine = load(model_folder("qwen3", layers=1))
    succeeded(engine.run(ops(0)))
    saved = {tenant.run: engine.run([Save(tenant.run, 5)]).outputs[tenant.run, 5] for tenant in SOME}
    weights = {run: out.weights for run, out in saved.items() if isinstance(out, SaveOutput)}
    decoder = engine.decoder(weights.__getitem__, kv_tokens=4096, text=None)
    asked: list[tuple[str | None, dict[str, Any]]] = [
        (None, {"temperature": 0.0}),
        ("head-16", {"top_k": 3}),
        ("soft-8", {"top_p": 0.5, "topk_sample_logprobs": 2}),
        ("all-5", {"top_k": 7, "top_p": 0.9, "topk_sample_logprobs": 3}),
    ]
    for at, (run, changes) in enumerate(asked):
        # The last token of a page and the one after it are among the generated ones.
        decoder.add(request(str(at), np.arange(250) % 128, run, max_tokens=12, **changes))
    while decoder.step().decoded_tokens < 4:
        pass
    decoder.step()  # graphs are captured by now

    cuda.mode = "error"
    told = [decoder.step() for _ in range(6)]
    cuda.mode = "default"

    assert [progress.decoded_tokens for progress in told] == [4] * 6
    assert finish(decoder, []).keys() == {"0", "1", "2", "3"}


@pytest.mark.variants
def test_many_requests_finish_in_little_memory(
    cuda: Rehearsal, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sample over few pages, whose memory is full of NaN, with steps that overlap. One GPU failed in this situation."""
    monkeypatch.setattr(model_runner, "CudaRecorder", lambda: repeat(cuda))
    step = inspect.unwrap(EngineDecoder.step)
    monkeypatch.setattr(EngineDecoder, "step", torch.no_grad()(step))
    engine = load(model_folder("qwen3", layers=1))
    succeeded(engine.run(ops(0)))
    saved = {tenant.run: engine.run([Save(tenant.run, 5)]).outputs[tenant.run, 5] for tenant in SOME}
    weights = {run: out.weights for run, out in saved.items() if isinstance(out, SaveOutput)}
    decoder = engine.decoder(weights.__getitem__, kv_tokens=256 * 6, text=None)
    cache = decoder._cache
    for memory in (*cache._keys, *cache._values):
        memory[: cache.pages * cache.page_tokens] = torch.nan
    keys = [None, *weights]

    found = finish(
        decoder, [request(f"r{at}", np.arange(at % 9 * 9 + 1), keys[at % 4], max_tokens=9, seed=at) for at in range(24)]
    )

    assert len(found) == 24
    assert [each for each in found.values() if not isinstance(each, SampleOutput)] == []


def test_a_mixture_of_experts_is_captured_and_decodes_without_a_wait(
    cuda: Rehearsal, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_runner, "CudaRecorder", lambda: repeat(cuda))
    monkeypatch.setattr(expert_check, "WIDE_SIZES", (32, 16))  # plain code is slow
    step = inspect.unwrap(EngineDecoder.step)
    monkeypatch.setattr(EngineDecoder, "step", torch.no_grad()(step))
    folder = model_folder("qwen3_moe", layers=1)
    engine, plain = load(folder), Engine.load(str(folder), dtype=torch.bfloat16)
    specs = {"all-8": AdapterSpec(8, 1), "own-3": AdapterSpec(3, 2, per_expert=True), "mlp-16": AdapterSpec(16, 3)}
    weights = {name: random_weights(spec, plain.adapters.layout_of) for name, spec in specs.items()}
    asked = [
        request(str(at), np.arange(3, 4 + 5 * at), run, temperature=0.0, max_tokens=12)
        for at, run in enumerate([None, *specs])
    ]
    decoders = [each.decoder(weights.__getitem__, kv_tokens=2048, text=None) for each in (engine, plain)]
    for each in asked:
        decoders[0].add(each)
    while decoders[0].step().decoded_tokens < 4:
        pass
    decoders[0].step()  # the graph is captured by now

    cuda.mode = "error"
    told = [decoders[0].step() for _ in range(3)]
    cuda.mode = "default"
    ours, theirs = finish(decoders[0], []), finish(decoders[1], asked)

    assert graph_report(decoders[0]) == "1 in use"
    assert [progress.decoded_tokens for progress in told] == [4] * 3
    assert "is slow" not in caplog.text
    for name, expected in theirs.items():
        found = ours[name]
        assert isinstance(found, SampleOutput)
        assert isinstance(expected, SampleOutput)
        for one, other in zip(found.sequences, expected.sequences, strict=True):
            assert abs(one.logprobs[0] - other.logprobs[0]) < 0.05


def test_a_decoder_without_kernels_of_experts_says_so(
    cuda: Rehearsal, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(expert_check, "missing_kernels", lambda _: "triton is not installed")
    no_weights: dict[str, HostWeights] = {}

    decoder = load(model_folder("qwen3_moe", layers=1)).decoder(no_weights.__getitem__, kv_tokens=2048, text=None)

    assert decoder.runner.graphs is None
    assert "Decoding is slow here, a loop over experts and adapters: triton is not installed" in caplog.text


@pytest.mark.parametrize("trained_on", [pytest.param(False, marks=pytest.mark.variants), True])
def test_a_sampler_is_refreshed_without_a_waiting_copy(
    cuda: Rehearsal, model_folder: ModelFolder, *, trained_on: bool
) -> None:
    engine = load(model_folder("qwen3", layers=1), lora_backend="seg")
    succeeded(engine.run(ops(0)))
    cuda.waits.clear()
    out = engine.run([Save(tenant.run, 5) for tenant in SOME]).outputs
    assert cuda.waits == []
    saved = [each.weights for each in out.values() if isinstance(each, SaveOutput)]
    plain = [HostWeights(each.spec, each.flat.clone()) for each in saved]
    if trained_on:  # the adapters have changed: weights come from the host, through pinned memory
        succeeded(engine.run(ops(1)))
    assert all((each.on_device() is None) == trained_on for each in saved)

    contents = []
    for weights in (saved, plain):
        by_key = {str(at): each for at, each in enumerate(weights)}
        decoder = engine.decoder(by_key.__getitem__, kv_tokens=2048, text=None)
        cuda.waits.clear()
        slots = [decoder.slots.pin(key) for key in by_key]
        contents.append([each.pool.flat[each.index].cpu() for each in slots if each])
        waits = [each for each in cuda.waits if each != "copy to cpu"]  # copies of this test
        assert set(waits) <= {"aten._local_scalar_dense"}  # the check that all values are finite

    assert len(contents[0]) == len(SOME)
    assert all(map(torch.equal, *contents))


def test_adapters_move_through_pinned_memory_without_a_wait(cuda: Rehearsal) -> None:
    targets = (Target("q_proj", "attn", 64, 64), Target("up_proj", "mlp", 64, 96))
    spec = AdapterSpec(8, seed=0)
    size = 8 * (64 + 64 + 64 + 96)
    bank = AdapterBank(targets, DEVICE, torch.bfloat16, adapter_bytes=2 * size * 18)
    for run in "abcd":
        bank.create(run, spec)
    before = {run: bank.state(run).digest() for run in "abcd"}
    cuda.mode = "error"

    for runs in ("ab", "cd", "ad", "bc"):
        bank.bring_in(list(runs))
        bank.release()
        bank.prefetch(["d", "a"])

    cuda.mode = "default"
    assert bank.offloaded == 2
    assert {run: bank.state(run).digest() for run in "abcd"} == before


def test_only_the_weights_of_a_new_adapter_are_copied_to_the_device(cuda: Rehearsal) -> None:
    bank = AdapterBank((Target("q_proj", "attn", 64, 64),), DEVICE, torch.bfloat16)
    cuda.waits.clear()

    made = bank.create("a", AdapterSpec(8, seed=0))

    assert cuda.waits == ["copy to cuda"]
    assert all(arena.is_cuda for arena in made.arenas.values())
    assert not made.m.any()
    assert not made.v.any()


def test_the_simulated_device_refuses_what_cuda_refuses(cuda: Rehearsal) -> None:
    here, there = torch.ones(2, 2), torch.ones(2, 2, device=DEVICE)
    with pytest.raises(RuntimeError, match="on the host"):
        there + here
    with pytest.raises(TypeError, match="can't convert"):
        there.numpy()
    cuda.mode = "error"
    with pytest.raises(WouldWait):
        there.sum().item()
    with pytest.raises(WouldWait, match="copy to cuda"):
        here.to(DEVICE, non_blocking=True)
