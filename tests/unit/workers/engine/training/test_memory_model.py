"""Memory model of micro-batches: measured lines, token budgets, and measurements.

The meter of the measurements counts the tensors saved by autograd instead of CUDA memory.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from bench.support.model import SHAPES
from bench.support.roofline import adapter_bytes, adapter_parameters, flops_per_token
from cotrain_workers.engine.adapters.bank import AdapterBank, adapter_budget
from cotrain_workers.engine.decoding.kv_cache import CUDA_SHARE, sampler_bytes
from cotrain_workers.engine.lora.backend import find_backend
from cotrain_workers.engine.model.activation_checkpointing import RecomputePolicy
from cotrain_workers.engine.model.base_model import BaseModel
from cotrain_workers.engine.training.forward_backward import ForwardBackward
from cotrain_workers.engine.training.memory_model import (
    CPU_TOKENS,
    ENOUGH_TOKENS,
    MAX_TOKENS,
    OWN_BYTES,
    RECOMPUTED_TIME,
    TOWER_SHARE,
    UNDO_SHARE,
    ActivationModel,
    Activations,
    Line,
    TooLittleMemory,
    budget,
    fit,
    kept_is_faster,
    kept_tokens,
    longest_datum,
    measure,
    measure_tower,
    micro_batch_bytes,
    rounded,
    size_micro_batches,
    stepped,
)
from cotrain_workers.engine.training.micro_batches import Budget
from tests.support.training import NewEngine

GB = 10**9
HEAD = Line(1 * GB, 1)
KEPT, RECOMPUTED = ActivationModel(HEAD, Line(1 * GB, 7e6)), ActivationModel(HEAD, Line(1.2 * GB, 0.3e6))
BOTH = Activations(KEPT, RECOMPUTED)


def test_the_fitted_line_goes_through_both_points() -> None:
    line = fit([(1024, 8 * GB), (2048, 15 * GB)])

    assert line.fixed_bytes == pytest.approx(1 * GB)
    assert line.bytes_per_token == pytest.approx(7 * GB / 1024)
    assert line.tokens_in(8 * GB + 1000) == 1024


def test_the_larger_line_is_the_peak() -> None:
    model = ActivationModel(head=Line(2.4 * GB, 0.32e6), layers=Line(0.9 * GB, 0.51e6))

    assert model.bytes_of(2048) == pytest.approx(3.06 * GB, rel=0.01)
    assert model.bytes_of(32_768) == pytest.approx(17.6 * GB, rel=0.01)
    assert model.tokens_in(60 * GB) == int(59.1 * GB // 0.51e6)
    assert model.tokens_in(3 * GB) == int(0.6 * GB // 0.32e6)


def test_the_fixed_part_is_never_negative() -> None:
    assert fit([(1000, 900), (2000, 2000)]).fixed_bytes == 0


@pytest.mark.parametrize("measured", [[(1024, 5), (1024, 6)], [(1024, 5), (2048, 5)]])
def test_memory_that_does_not_grow_is_not_a_measurement(measured: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="does not grow"):
        fit(measured)


def bytes_of(tokens: int) -> int:
    """Return bytes in which that many tokens are kept, or more of them recomputed."""
    return int(KEPT.bytes_of(tokens)) + 1


@pytest.mark.parametrize(
    ("fitting", "choice", "expected"),
    [
        (4196, "auto", Budget(4096, 4096)),
        (4196, "never", Budget(4096, 4096)),
        (3996, "auto", Budget(3072, 3072)),
        (3996, "always", Budget(4096, 0)),
        (1600, "auto", Budget(1536, 1536)),
        (800, "auto", Budget(768, 768)),
        (700, "auto", Budget(4096, 512)),
        (700, "never", Budget(512, 512)),
        (100, "auto", Budget(1536, 0)),
    ],
)
def test_layers_are_recomputed_where_that_is_faster(fitting: int, choice: RecomputePolicy, expected: Budget) -> None:
    assert budget(BOTH, bytes_of(fitting), choice) == expected


@pytest.mark.parametrize(
    ("kept", "recomputed", "is_faster"),
    [
        (1536, 4096, True),  # an H100 with 32 adapters of an 8B model
        (768, 4096, True),
        (512, 4096, False),
        (512, 768, True),
        (256, 4096, False),
        (256, 256, True),
        (0, 256, False),
        (0, 0, False),
        (256, 0, True),
    ],
)
def test_few_kept_tokens_are_faster_than_many_recomputed_ones(kept: int, recomputed: int, is_faster: bool) -> None:
    assert kept_is_faster(kept, recomputed) == is_faster


@pytest.mark.parametrize(("choice", "expected"), [("auto", 16_000), ("never", 685)])
def test_the_longest_datum_is_recomputed_if_it_may_be(choice: RecomputePolicy, expected: int) -> None:
    longest, save_tokens = longest_datum(BOTH, 6 * GB, choice)
    assert longest == pytest.approx(expected, abs=30)
    assert save_tokens == sys.maxsize
    assert longest_datum(Activations(None, None), 6 * GB, choice) == (0, sys.maxsize)


@pytest.mark.parametrize(
    ("choice", "host_tokens", "expected"),
    [
        ("auto", 10**6, (50_000, 12_288)),
        ("always", 40_000, (40_000, 12_288)),  # host memory is the limit
        ("auto", 8_000, (16_000, sys.maxsize)),  # the host has too little
        ("never", 10**6, (685, sys.maxsize)),
    ],
)
def test_a_longer_datum_has_its_layer_inputs_on_the_host(
    choice: RecomputePolicy, host_tokens: int, expected: tuple[int, int]
) -> None:
    each = replace(BOTH, saving=ActivationModel(HEAD, Line(GB, 100_000)))
    longest, save_tokens = longest_datum(each, 6 * GB, choice, host_tokens)
    assert longest == pytest.approx(expected[0], abs=30)
    assert save_tokens == expected[1]


def test_lengths_that_move_bits_are_far_apart() -> None:
    assert [stepped(each) for each in (1, 2, 3, 5, 6, 99, 130_000, 131_072)] == [
        1, 2, 3, 4, 6, 96, 98_304, 131_072,
    ]  # fmt: skip


def test_the_time_of_a_second_forward_is_that_of_its_flop() -> None:
    flop = [flops_per_token(SHAPES["8b"], 2048, 16, recompute=recompute) for recompute in (True, False)]

    assert flop[0] / flop[1] == pytest.approx(RECOMPUTED_TIME, abs=0.01)


def test_the_micro_batch_of_a_large_device_is_limited() -> None:
    assert budget(BOTH, 10_000 * GB, "auto").tokens == MAX_TOKENS
    assert budget(BOTH, 10_000 * GB, "always").tokens == ENOUGH_TOKENS


@pytest.mark.parametrize("choice", ["auto", "always"])
def test_a_probe_that_fits_only_with_recomputation_is_sufficient(choice: RecomputePolicy) -> None:
    found = budget(Activations(None, RECOMPUTED), 4 * GB, choice)

    assert (found.tokens, found.keep_tokens) == (ENOUGH_TOKENS, 0)


@pytest.mark.parametrize("choice", ["auto", "always", "never"])
@pytest.mark.parametrize("both", [BOTH, Activations(None, None)])
@pytest.mark.parametrize("free_bytes", [GB, -GB])
def test_too_little_memory_is_an_error_that_names_the_micro_batch(
    choice: RecomputePolicy, both: Activations, free_bytes: int
) -> None:
    with pytest.raises(TooLittleMemory, match="micro-batch"):
        budget(both, free_bytes, choice)


def test_sizes_are_few_and_far_apart() -> None:
    sizes = sorted({rounded(tokens) for tokens in range(0, 50_000, 7)})

    assert sizes[:5] == [0, 256, 512, 768, 1024]
    assert sizes[-1] == MAX_TOKENS
    assert all(rounded(size) == size and rounded(size - 1) < size for size in sizes[1:])
    assert all(later >= 1.3 * size for size, later in itertools.pairwise(sizes[2:]))


def test_a_given_size_determines_only_the_tokens_kept() -> None:
    free_bytes = int(KEPT.bytes_of(5000))

    assert kept_tokens(BOTH, free_bytes, "auto") == 5000
    assert kept_tokens(BOTH, free_bytes, "always") == 0


def test_adapters_and_key_value_memory_are_subtracted_first() -> None:
    free = micro_batch_bytes(141 * GB, 17 * GB, 0)

    assert micro_batch_bytes(141 * GB, 17 * GB, 10 * GB) == pytest.approx(free - 9.5 * (1 + UNDO_SHARE) * GB)
    assert 0.7 < free / (124 * GB) < 0.75
    assert micro_batch_bytes(141 * GB, 17 * GB, 0, 3 * GB) == free - 3 * GB
    assert micro_batch_bytes(141 * GB, 17 * GB, 0, 60 * GB) == int(free * (1 - TOWER_SHARE))
    rows = Activations(KEPT, RECOMPUTED).with_images(1e5)
    assert rows == Activations(
        ActivationModel(Line(GB, 1e5 + 1), Line(GB, 7.1e6)), ActivationModel(Line(GB, 1e5 + 1), Line(1.2 * GB, 4e5))
    )
    # Qwen3-8B on an H200 with 24 GB of adapters: 7 MB per token, and 8,192 tokens are kept.
    assert budget(BOTH, micro_batch_bytes(141 * GB, 17 * GB, 24 * GB), "auto").keep_tokens == 8192


@pytest.mark.parametrize(
    ("total", "tokens", "adapters", "kv_tokens"),
    [(150_100_000_000, 8192, 31, 180_000), (85_000_000_000, 4096, 15, 80_000)],  # H200, H100
)
def test_all_parts_fit_on_one_gpu_next_to_qwen3_8b(total: int, tokens: int, adapters: int, kv_tokens: int) -> None:
    shape = SHAPES["8b"]
    linear = shape.layers * sum(inputs * outputs for inputs, outputs in shape.linears)
    base = 2 * (linear + 2 * shape.hidden * shape.vocab)
    of_adapters = adapter_budget(total, base)
    # Chunk of the head: logits, probabilities, and their gradient in 16 bits. 1.4 times the ideal bytes per token.
    line = Line(1024 * shape.vocab * 10, 1.4 * 4.94e6)
    decoder = int((total - base - GB) * CUDA_SHARE)  # share of the memory free at its creation
    weights = sampler_bytes(32 * 2 * adapter_parameters(shape, 32), decoder)

    found = budget(
        Activations(ActivationModel(line, line), RECOMPUTED), micro_batch_bytes(total, base, of_adapters), "auto"
    )

    assert (found.tokens, found.keep_tokens) == (tokens, tokens)
    micro_batch = int(line.bytes_of(tokens))
    assert base + of_adapters + decoder + micro_batch + OWN_BYTES <= total
    assert of_adapters // adapter_bytes(shape, 16, torch.bfloat16) == adapters
    token_bytes = 2 * shape.layers * shape.kv_heads * shape.head * 2
    assert (decoder - weights) // token_bytes >= kv_tokens


def waves(base: BaseModel) -> partial[ForwardBackward]:
    backend = find_backend("seg", base.targets, base.head_weight)
    return partial(ForwardBackward, base, backend, head_chunk_rows=64)


def saved_bytes(run: Callable[[], bool]) -> int | None:
    by_storage: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        by_storage[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        fitted = run()
    return sum(by_storage.values()) if fitted else None


def test_measured_memory_is_linear_and_smaller_with_recomputation(new_engine: NewEngine) -> None:
    base = new_engine()._base
    bank = AdapterBank(base.targets, torch.device("cpu"), torch.float32)

    found = measure(base, waves(base), bank, saved_bytes)

    assert found.kept is not None
    assert found.recomputed is not None
    assert found.kept.layers.bytes_per_token > 4 * found.recomputed.layers.bytes_per_token
    assert "probe" not in bank


def test_large_micro_batches_are_predicted_although_the_head_takes_most_in_small_ones(new_engine: NewEngine) -> None:
    base = new_engine()._base
    bank = AdapterBank(base.targets, torch.device("cpu"), torch.float32)

    def bytes_of(tokens: int, chunk_rows: int) -> float:
        # Qwen3-8B with recomputed layers, counted on the device without values, for chunks of 1,024 rows of the head.
        # Here the chunk is 64 rows, so that all sizes are a sixteenth.
        return max(2.4e9 * chunk_rows / 64 + 16 * 0.32e6 * tokens, 0.86e9 + 16 * 0.507e6 * tokens)

    def peak(run: Callable[[], bool]) -> int:
        assert isinstance(run, partial)
        return int(bytes_of(run.keywords["tokens"], run.args[0].keywords["head_chunk_rows"]))

    found = measure(base, waves(base), bank, peak).recomputed

    assert found is not None
    for tokens in (64, 128, 512, 2048):
        assert found.bytes_of(tokens) == pytest.approx(bytes_of(tokens, 64), rel=0.01)
    assert found.bytes_of(2048) > 1.3 * found.head.bytes_of(2048)  # the prediction of the head's line alone


def test_a_probe_that_does_not_fit_is_reported(new_engine: NewEngine) -> None:
    base = new_engine()._base
    bank = AdapterBank(base.targets, torch.device("cpu"), torch.float32)

    def refuse(*_: object) -> None:
        if not base.recompute.is_on:
            raise torch.OutOfMemoryError

    base.backbone.register_forward_pre_hook(refuse)

    found = measure(base, waves(base), bank, saved_bytes)

    assert found.kept is None
    assert found.recomputed is not None


@pytest.mark.parametrize(("fitting", "tokens"), [(10**6, 64), (20, 16)])
def test_the_tower_is_measured_with_the_largest_image_that_fits(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, fitting: int, tokens: int
) -> None:
    base, sizes = new_engine("qwen3-vl")._base, []
    assert base.vision is not None
    run = base.vision._run

    def measured(pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        if len(pixels) > 4 * fitting:
            raise torch.OutOfMemoryError
        sizes.append(len(pixels) // 4)
        return run(pixels, grid)

    monkeypatch.setattr(base.vision, "_run", measured)

    peak_bytes, token_bytes = measure_tower(base, lambda run: 7 if run() else None)

    assert (sizes, peak_bytes) == ([tokens], 7)
    assert token_bytes == 2 * 64 * 4  # of the embedding and of one layer, 64 values in fp32
    assert measure_tower(new_engine()._base, lambda _: 7) == (0, 0.0)


@pytest.mark.parametrize(
    ("asked", "choice", "expected"),
    [
        ("auto", "auto", Budget(CPU_TOKENS, sys.maxsize)),
        (512, "never", Budget(512, sys.maxsize)),
        (512, "always", Budget(512, 0)),
    ],
)
def test_on_a_cpu_nothing_is_measured(
    new_engine: NewEngine, asked: int, choice: RecomputePolicy, expected: Budget
) -> None:
    base = new_engine()._base

    assert size_micro_batches(base, waves(base), asked, choice, adapter_bytes=0) == expected


def test_the_measured_size_is_part_of_the_numerics(new_engine: NewEngine) -> None:
    assert new_engine().facts.numerics.micro_batch_tokens == CPU_TOKENS
    assert new_engine().facts.numerics_id == new_engine(micro_batch_tokens=CPU_TOKENS).facts.numerics_id
