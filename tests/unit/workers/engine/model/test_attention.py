"""Packed sequences compared with separate ones, for every family: positions restart, and no
sequence attends to another.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine import routing
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.model import attention as attn
from cotrain_workers.engine.model import base_model
from cotrain_workers.engine.model.base_model import TokenRow
from cotrain_workers.engine.ops import Create, Datum, Op, Pass, PassOutput
from cotrain_workers.engine.routing import AttentionRule, EqualLengths, SequenceTable
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.engine.training import batch_runner
from tests.support.shared_base import load_plain
from tests.support.training import ModelFolder, NewEngine, random_datum

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_kernel_is_checked_before() -> None:
    attn.varlen_is_right.cache_clear()
    attn.needs_copies.cache_clear()


LENGTHS = (17, 5, 40, 40, 1, 33)  # and windows of 16 tokens


def datums() -> list[Datum]:
    rng = np.random.default_rng(0)
    return [random_datum(rng, "cross_entropy", length) for length in LENGTHS]


def together_logprobs(engine: Engine, datums: Sequence[Datum]) -> np.ndarray:
    ops: list[Op] = [
        Create("run", 0, AdapterSpec(4, seed=0)),
        Pass("run", 1, datums, "cross_entropy", {}, needs_grad=False),
    ]
    output = engine.run(ops).outputs["run", 1]
    assert isinstance(output, PassOutput)
    return np.concatenate(output.logprobs)


@torch.no_grad()
def unpacked_logprobs(folder: Path, datums: Sequence[Datum]) -> np.ndarray:
    model = load_plain(folder, torch.float32)
    found = []
    for datum in datums:
        logits = model(input_ids=torch.from_numpy(datum.tokens)[None], use_cache=False).logits[0]
        targets = torch.from_numpy(datum.inputs["target_tokens"])[:, None]
        found.append(torch.log_softmax(logits, -1).gather(1, targets)[:, 0].numpy())
    return np.concatenate(found)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_sequences_in_one_row_equal_each_alone(new_engine: NewEngine, model_folder: ModelFolder, family: str) -> None:
    together = together_logprobs(new_engine(family), datums())

    alone = unpacked_logprobs(model_folder(family), datums())
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3"])
def test_the_comparison_detects_wrong_positions_and_leaks(
    new_engine: NewEngine, model_folder: ModelFolder, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = unpacked_logprobs(model_folder(family), datums())
    right = base_model.token_row

    def positions_run_on(*args: Any) -> TokenRow:
        row = right(*args)
        # rotary embeddings depend on distances only
        return replace(row, positions=5 * np.arange(len(row.ids)))

    def one_long_sequence(*args: Any) -> TokenRow:
        row = right(*args)
        return replace(row, lengths=[len(row.ids)])

    for wrong in (positions_run_on, one_long_sequence):
        monkeypatch.setattr(batch_runner, "token_row", wrong)
        together = together_logprobs(new_engine(family), datums())
        assert np.abs(together - alone).max() > 1e-2, wrong.__name__


def test_the_model_does_not_run_without_a_segment_table(new_engine: NewEngine) -> None:
    engine = new_engine()
    ids = torch.zeros(1, 32, dtype=torch.int64)

    with pytest.raises(RuntimeError, match="no segment table"):
        engine._base.backbone(input_ids=ids, use_cache=False)


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: torch.Tensor, back: int, scale: float
) -> torch.Tensor:
    """Return the attention of each sequence, with explicit scores; `[T, heads, d]`."""
    assert query.shape[1] == key.shape[1]
    outs = []
    for start, stop in itertools.pairwise(offsets.tolist()):
        q, k, v = (x[start:stop].transpose(0, 1) for x in (query, key, value))
        at = torch.arange(stop - start)
        seen = (at[:, None] >= at) & (at[:, None] - at <= back)
        scores = (scale * q @ k.transpose(1, 2)).masked_fill(~seen, -torch.inf)
        outs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs)


def kernel_of_torch_2_10(  # all signatures of varlen_attn so far
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
) -> torch.Tensor:
    assert is_causal
    return plain_attention(query, key, value, cu_seq_q, max_q, query.shape[-1] ** -0.5)


def kernel_of_torch_2_11(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    assert scale is not None
    assert window_size[1] == 0
    back = window_size[0] if window_size[0] >= 0 else max_q
    return plain_attention(query, key, value, cu_seq_q, back, scale)


def kernel_of_torch_2_13(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    assert enable_gqa
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    return kernel_of_torch_2_11(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size
    )


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("kernel", [kernel_of_torch_2_10, kernel_of_torch_2_11, kernel_of_torch_2_13])
def test_every_signature_of_the_ragged_kernel_gives_the_same_results(
    kernel: Callable[..., torch.Tensor], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attn, "varlen_kernel", lambda: kernel)
    known = frozenset(inspect.signature(kernel).parameters)
    monkeypatch.setattr(attn, "varlen_parameters", lambda: known)
    table = SequenceTable(LENGTHS, torch.device("cpu"))
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(LENGTHS), heads, 8, generator=g) for heads in (4, 2, 2))
    rule = AttentionRule(scaling=0.2, window=window, softcap=None)
    if kernel is kernel_of_torch_2_10 and window:
        assert "no windows" in attn.varlen_lacks(torch.bfloat16, rule)
        return

    ragged = attn.varlen_attention(q, k, v, table, rule)

    sizes = [s.sequences * s.length for s in table.equal_lengths]
    rows = zip(table.equal_lengths, *(torch.split(x, sizes) for x in (q, k, v)), strict=True)
    outs = [attn.attend(group, q, k, v, table, rule) for group, q, k, v in rows]
    torch.testing.assert_close(ragged, torch.cat(outs), rtol=1e-5, atol=1e-6)


def test_very_short_sequences_in_turn_are_grouped_by_length_with_the_same_bits(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each needs a call of its own in each layer, which takes as long as a hundred tokens."""
    rng = np.random.default_rng(3)
    # One long sequence comes twice: a shared prompt between the short ones.
    long = random_datum(rng, "cross_entropy", 80)
    data = [random_datum(rng, "cross_entropy", 1 + at % 3) for at in range(60)]
    data[20:20] = [long, replace(long, inputs=random_datum(rng, "cross_entropy", 80).inputs)]
    calls: list[int] = []

    def trained() -> list[torch.Tensor]:
        engine = new_engine()
        passed = Pass("run", 1, data, "cross_entropy", {}, needs_grad=True)
        output = engine.run([Create("run", 0, AdapterSpec(4, seed=0)), passed]).outputs["run", 1]
        assert isinstance(output, PassOutput)
        assert output.shared_tokens
        found = torch.from_numpy(np.concatenate(output.logprobs))
        return [found, engine.adapters["run"].gradient.flat]

    attend = attn.attend

    def counted(group: EqualLengths, *args: Any) -> torch.Tensor:
        calls.append(group.sequences)
        return attend(group, *args)

    monkeypatch.setattr(attn, "attend", counted)
    grouped = trained()
    in_groups = len(calls)
    monkeypatch.setattr(routing, "FEW_CALLS", 1_000)
    apart = trained()
    assert (len(calls) - in_groups) > 8 * in_groups
    for ours, expected in zip(grouped, apart, strict=True):
        assert torch.equal(ours.view(torch.int32), expected.view(torch.int32))


def with_fewer_heads(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute like torch 2.11, whose kernel takes fewer key-value heads without an argument."""
    q, k, v, *rest = args
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return kernel_of_torch_2_11(q, k, v, *rest, **kwargs)


def with_wrong_heads(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute with the wrong key-value heads if there are fewer than query heads."""
    q, k, v, *rest = args
    k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1) for x in (k, v))
    return kernel_of_torch_2_11(q, k, v, *rest, **kwargs)


@pytest.mark.parametrize(("kernel", "heads"), [(with_fewer_heads, 2), (with_wrong_heads, 4), (kernel_of_torch_2_11, 4)])
def test_keys_and_values_are_copied_only_for_a_kernel_that_needs_it(
    kernel: Callable[..., torch.Tensor], heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    def seen(*args: Any, **kwargs: Any) -> torch.Tensor:
        given.append(args[1].shape[1])
        return kernel(*args, **kwargs)

    known = frozenset(inspect.signature(kernel_of_torch_2_11).parameters)
    monkeypatch.setattr(attn, "varlen_kernel", lambda: seen)
    monkeypatch.setattr(attn, "varlen_parameters", lambda: known)
    rule = AttentionRule(0.2, 16, None)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(LENGTHS), heads, 8, generator=g, dtype=torch.bfloat16) for heads in (4, 2, 2))

    assert attn.varlen_is_right(CPU, torch.bfloat16, (4, 2, 8), rule)
    given.clear()
    found = attn.varlen_attention(q, k, v, SequenceTable(LENGTHS, CPU), rule)

    assert given == [heads]  # and no second comparison
    expected = with_fewer_heads(
        q, k, v, SequenceTable(LENGTHS, CPU).offsets(), None, 40, 40, scale=0.2, window_size=(15, 0)
    )
    torch.testing.assert_close(found, expected)


def test_a_ragged_kernel_is_used_if_it_and_its_gradients_are_correct(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rule = AttentionRule(0.2, 16, None)

    def check(kernel: Callable[..., torch.Tensor] | None) -> bool:
        known = frozenset(inspect.signature(kernel).parameters) if kernel else frozenset()
        monkeypatch.setattr(attn, "varlen_kernel", lambda: kernel)
        monkeypatch.setattr(attn, "varlen_parameters", lambda: known)
        attn.varlen_is_right.cache_clear()
        attn.needs_copies.cache_clear()
        attn.warn_slow.cache_clear()
        return attn.varlen_is_right(CPU, torch.bfloat16, (4, 2, 8), rule)

    def one_too_few(*args: Any, window_size: tuple[int, int], **kwargs: Any) -> torch.Tensor:
        return kernel_of_torch_2_13(*args, window_size=(window_size[0] - 1, 0), **kwargs)

    one_too_few.__signature__ = inspect.signature(kernel_of_torch_2_13)  # type: ignore[attr-defined]
    assert check(kernel_of_torch_2_13)
    assert not caplog.records
    assert not check(one_too_few)
    assert "The flash kernel (FA2) is off by" in caplog.text
    assert "its flash kernel is not right here" in caplog.text
    assert not check(kernel_of_torch_2_10)
    assert "has no windows in varlen_attn" in caplog.text
    assert not check(None)
    assert "has no varlen_attn" in caplog.text
    attn.varlen_is_right.cache_clear()


def test_attention_without_a_flash_kernel_is_reported_as_slow_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = frozenset(inspect.signature(kernel_of_torch_2_13).parameters)
    monkeypatch.setattr(attn, "varlen_parameters", lambda: known)
    attn.varlen_is_right.cache_clear()
    attn.warn_slow.cache_clear()

    for window in (16, None):  # layers of Gemma 2
        rule = AttentionRule(0.2, window, 50.0)
        assert not attn.varlen_is_right(CPU, torch.bfloat16, (4, 2, 8), rule)
    (said,) = caplog.messages
    assert "slow" in said
    assert "grows with the square of a sequence's length" in said
    assert "a cap on scores" in said
    assert not attn.varlen_is_right(CPU, torch.float32, (4, 2, 8), AttentionRule(0.2, None, None))
    assert "no kernel for torch.float32" in caplog.text
    attn.varlen_is_right.cache_clear()


@pytest.mark.parametrize(
    ("capability", "failure", "expected"),
    [
        ((9, 0), None, True),
        ((9, 0), ModuleNotFoundError("No module named 'flash_attn_interface'"), False),
        ((9, 0), RuntimeError("does not expose FA3 backward kernels"), False),
        ((10, 0), None, False),
    ],
)
def test_flash_attention_3_is_used_on_a_hopper_if_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], failure: Exception | None, expected: bool
) -> None:
    activated: list[str] = []

    def activate(name: str) -> None:
        if failure:
            raise failure
        activated.append(name)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)

    assert attn.use_flash_3(torch.device("cuda")) == expected
    assert activated == (["FA3"] if expected else [])


def test_an_incorrect_flash_attention_3_is_replaced_by_2(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_use = ["FA3"]

    def kernel(*args: Any, window_size: tuple[int, int], **kwargs: Any) -> torch.Tensor:
        wrong = in_use[0] == "FA3"
        return kernel_of_torch_2_13(*args, window_size=(window_size[0] - wrong, 0), **kwargs)

    known = frozenset(inspect.signature(kernel_of_torch_2_13).parameters)
    monkeypatch.setattr(attn, "varlen_kernel", lambda: kernel)
    monkeypatch.setattr(attn, "varlen_parameters", lambda: known)
    monkeypatch.setattr(attn, "flash_in_use", lambda: in_use[0])
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", lambda: in_use.__setitem__(0, "FA2"))
    attn.varlen_is_right.cache_clear()

    rule = AttentionRule(0.2, 16, None)
    assert attn.varlen_is_right(CPU, torch.bfloat16, (4, 2, 8), rule)
    assert in_use == ["FA2"]
    assert "The flash kernel (FA3) is off by" in caplog.text
    attn.varlen_is_right.cache_clear()


@pytest.mark.parametrize("asked", [{"sinks": torch.zeros(1)}, {"is_causal": False}, {"dropout": 0.1}])
def test_attention_that_is_not_implemented_is_refused(asked: dict[str, object]) -> None:
    module, x = torch.nn.Identity(), torch.zeros(1, 2, 4, 8)

    with pytest.raises(NotImplementedError, match="does not implement"):
        attn.attention_per_sequence(module, x, x, x, None, scaling=1.0, **asked)  # type: ignore[arg-type]
