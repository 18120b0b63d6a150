"""Attention over a packed row: each sequence attends only to itself, by the segment table of the route.

`attention_per_sequence` is registered with transformers as `PER_SEQUENCE`. transformers packs by `position_ids` only
without a KV cache, and otherwise ignores them silently. This function cannot run without the table.

Each attention kernel is compared with dense attention on a small packed row before it is used.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from cotrain_workers.engine.model.delta_rule import Moved, move_of
from cotrain_workers.engine.model.kernel_check import agrees, difference
from cotrain_workers.engine.routing import AttentionRule, EqualLengths, Prompt, Router, SequenceTable

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

PER_SEQUENCE = "cotrain_per_sequence"
NARROW = (torch.bfloat16, torch.float16)
UNSUPPORTED_ARGUMENTS = ("sinks", "head_mask", "attention_bias")
#: Sequence lengths of the comparison: across blocks, short, and exactly one block.
PROBE = (200, 1, 3, 180, 256)
#: Relative to the largest value, for 16-bit results against fp32; probabilities are rounded twice in backward.
TOLERANCE = 2e-2

log = logging.getLogger(__name__)


def register() -> None:
    """Register `PER_SEQUENCE` with transformers; a second call has no effect."""
    AttentionInterface.register(PER_SEQUENCE, attention_per_sequence)
    # No mask is needed besides the segment table. (A dense one would be T x T.)
    AttentionMaskInterface.register(PER_SEQUENCE, lambda *args, **kwargs: None)


def attach(module: nn.Module, router: Router, layer: int) -> None:
    """Attach the router and the layer number to an attention module of the base model."""
    module.cotrain_router = router  # type: ignore[assignment]
    module.cotrain_layer = layer  # type: ignore[assignment]


def attention_per_sequence(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention within each sequence.

    `query` is `[1, heads, T, d]`, `key` and `value` `[1, kv_heads, T, d]`; returns `[1, T, heads, d]`.
    Raises NotImplementedError for unsupported arguments, so that no model is silently wrong.
    """
    refuse_unsupported(dropout, kwargs)
    rule = AttentionRule(scaling, sliding_window or None, softcap, s_aux)
    # squeeze, because backward of `x[0]` writes zeros and copies
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, heads, d]
    width = v.shape[-1]
    if width < q.shape[-1]:  # latent attention (DeepSeek): kernels and the cache take one size
        v = functional.pad(v, (0, q.shape[-1] - width))
        return _attention(module, q, k, v, attention_mask, rule)[..., :width], None
    return _attention(module, q, k, v, attention_mask, rule), None


def _attention(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: torch.Tensor | None,
    rule: AttentionRule,
) -> torch.Tensor:
    """Return attention of the current route `[1, T, heads, d]`; `q`, `k` and `v` are `[T, heads, d]`."""
    router: Router = module.cotrain_router  # type: ignore[assignment]
    if router.step is not None:
        layer: int = module.cotrain_layer  # type: ignore[assignment]
        return router.step.attend(layer, q, k, v, rule)[None]
    if attention_mask is not None and attention_mask.numel() > 1:  # a single value is our placeholder
        raise NotImplementedError("Packed attention does not implement attention_mask.")
    table = router.route.sequences
    if varlen_takes(q, k, rule):
        return varlen_attention(q, k, v, table, rule)[None]
    there, back = None, None
    if table.rows_by_length is not None:
        there, back = (move_of(rows, q.device) for rows in table.rows_by_length)
        q, k, v = (Moved.apply(x, there, back) for x in (q, k, v))  # type: ignore[no-untyped-call]  # torch gives it no types
    sizes = [group.sequences * group.length for group in table.equal_lengths]
    rows = zip(*(torch.split(x, sizes) for x in (q, k, v)), strict=True)
    outs: list[torch.Tensor] = []
    before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    prompts: dict[Prompt, Sequence[torch.Tensor]] = {}
    for group, (own_q, own_k, own_v) in zip(table.equal_lengths, rows, strict=True):
        if group.prompt is None:
            before[group.start] = (own_k, own_v)
            outs.append(attend(group, own_q, own_k, own_v, table, rule))
            continue
        if group.prompt not in prompts:  # one slice, so that its gradient is summed before it is spread over rows
            first = before[group.prompt.start]
            prompts[group.prompt] = [x[: group.prompt.length] for x in first]
        outs.append(attend(group, own_q, own_k, own_v, table, rule, prompts[group.prompt]))
    out = torch.cat(outs) if len(outs) > 1 else outs[0]
    return (Moved.apply(out, back, there) if there else out)[None]  # type: ignore[no-untyped-call]  # see above


def refuse_unsupported(dropout: float, kwargs: dict[str, Any]) -> None:
    """Raise NotImplementedError if the model requests attention that this file does not compute."""
    asked = [name for name in UNSUPPORTED_ARGUMENTS if kwargs.get(name) is not None]
    if dropout:
        asked.append("dropout")
    if kwargs.get("is_causal") is False:
        asked.append("is_causal=False")
    if asked:
        raise NotImplementedError(f"Packed attention does not implement {', '.join(asked)}.")


def attend(
    group: EqualLengths,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: SequenceTable,
    rule: AttentionRule,
    prompt: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Return attention within each of `n` sequences of length `l`; all tensors are `[n * l, heads, d]`.

    They continue a `prompt`, whose keys and values are `[p, heads, d]`.
    """
    shape = (group.sequences, group.length, -1, q.shape[-1])
    q, k, v = (x.view(shape) for x in (q, k, v))
    if prompt:
        k, v = (
            torch.cat([first.expand(len(x), -1, -1, -1), x], dim=1) for first, x in zip(prompt, (k, v), strict=True)
        )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [n, heads, l, d], no copies
    length, before = group.length, k.shape[2] - group.length
    is_masked = before > 0 or (rule.window is not None and length > rule.window)
    if not rule.is_plain:
        out = adjusted_attention(q, k, v, table.mask(length, rule.window, before), rule)
    else:
        out = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=table.mask(length, rule.window, before) if is_masked else None,
            is_causal=not is_masked,
            scale=rule.scaling,
            enable_gqa=True,
        )
    return out.transpose(1, 2).flatten(0, 1)


def adjusted_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """Return attention with scores `cap * tanh(score / cap)` (Gemma 2), or with sinks; allocates `[n, heads, l, l]`.

    A sink is one more score of each query, without a value.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    products = q @ k.transpose(-1, -2)
    if rule.softcap is None:
        scores = products * rule.scaling
    else:
        scores = torch.tanh(products * (rule.scaling / rule.softcap)) * rule.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if rule.sinks is not None:
        column = rule.sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    shares = torch.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return shares[..., : k.shape[-2]] @ v


def varlen_takes(q: torch.Tensor, k: torch.Tensor, rule: AttentionRule) -> bool:
    """Return True if the flash kernel for ragged batches can compute this: on CUDA, in 16 bits, no cap or sinks."""
    if q.is_cuda and rule.sinks is not None:
        warn_slow("there is no kernel for sinks")
        return False
    return q.is_cuda and varlen_is_right(q.device, q.dtype, (q.shape[1], k.shape[1], q.shape[2]), rule)


def use_flash_3(device: torch.device) -> bool:
    """Switch torch's flash calls to FlashAttention 3 if it is installed and the GPU is a Hopper.

    Forward and backward of a sequence of 2,048 tokens then take slightly more than half the time.
    """
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if activate is None or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        activate("FA3")
    except (ImportError, RuntimeError, ValueError) as reason:
        log.info("FlashAttention 2 computes attention: %s", reason)
        return False
    return True


def flash_in_use() -> str:
    """Return the name of the implementation of torch's flash calls."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return (current and current()) or "FA2"


@cache
def varlen_is_right(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], rule: AttentionRule) -> bool:
    """Return True if the flash kernel matches dense attention; compares once and logs a mismatch.

    If FlashAttention 3 does not match, the whole process falls back to 2. `shape` contains query heads, key-value
    heads and head size.
    """
    lacking = varlen_lacks(dtype, rule)
    if not lacking:
        attends = partial(varlen_attention, table=SequenceTable(PROBE, device), rule=rule)
        flash = flash_in_use()
        if is_dense(f"The flash kernel ({flash})", attends, device, dtype, shape, rule):
            return True
        if flash != "FA2":
            torch.nn.attention.restore_flash_attention_impl()
            if is_dense("The flash kernel (FA2)", attends, device, dtype, shape, rule):
                return True
        lacking = "its flash kernel is not right here"
    warn_slow(lacking)
    return False


def varlen_lacks(dtype: torch.dtype, rule: AttentionRule) -> str:
    """Return the reason why no flash kernel of this torch computes a rule, or an empty string."""
    known = varlen_parameters()
    if dtype not in NARROW:
        return f"there is no kernel for {dtype}"
    if rule.softcap is not None:
        return "there is no kernel for a cap on scores"
    if not known:
        return f"torch {torch.__version__} has no varlen_attn"
    if rule.window is not None and "window_size" not in known:
        return f"torch {torch.__version__} has no windows in varlen_attn"
    return ""


@cache
def warn_slow(reason: str) -> None:
    """Log a reason once, not for each layer."""
    log.warning("Attention is slow here, and its memory grows with the square of a sequence's length: %s", reason)


@cache
def varlen_kernel() -> Callable[..., Any] | None:
    """Return `torch.nn.attention.varlen.varlen_attn`, or None before torch 2.10."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


@cache
def varlen_parameters() -> frozenset[str]:
    """Return the arguments of this torch's kernel; its signature changed with each release."""
    kernel = varlen_kernel()
    return frozenset(inspect.signature(kernel).parameters) if kernel else frozenset()


def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: SequenceTable, rule: AttentionRule
) -> torch.Tensor:
    """Return attention over the packed row by one kernel, for a rule that it supports; all tensors `[T, heads, d]`."""
    shape = (q.shape[1], k.shape[1], q.shape[2])
    if needs_copies(q.device, q.dtype, shape, rule, flash_in_use()):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return call_varlen(q, k, v, table, rule)


@cache
def needs_copies(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], rule: AttentionRule, flash: str
) -> bool:
    """Return True if the kernel needs K and V in as many heads as Q; compares once, for each implementation `flash`.

    Before `enable_gqa` the kernel took fewer heads without an argument, or none. The copies of a model with 4 query
    heads per key-value head would stay in memory for the backward of each layer.
    """
    if shape[0] == shape[1] or "enable_gqa" in varlen_parameters():
        return False
    attends = partial(call_varlen, table=SequenceTable(PROBE, device), rule=rule)
    name = f"The flash kernel ({flash}) without copies of K and V"
    return not is_dense(name, attends, device, dtype, shape, rule)


def call_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: SequenceTable, rule: AttentionRule
) -> torch.Tensor:
    """Call the kernel of this torch with its own arguments; all tensors `[T, heads, d]`."""
    kernel, known = varlen_kernel(), varlen_parameters()
    assert kernel is not None
    extra: dict[str, Any] = {}
    if "scale" in known:
        extra["scale"] = rule.scaling
    else:  # the kernel divides by sqrt(d)
        q = q * (rule.scaling * q.shape[-1] ** 0.5)
    if "window_size" in known:
        extra["window_size"] = ((rule.window - 1) if rule.window else -1, 0)
    else:
        extra["is_causal"] = True
    if "enable_gqa" in known:
        extra["enable_gqa"] = q.shape[1] != k.shape[1]
    offsets = table.offsets()
    out: torch.Tensor = kernel(q, k, v, offsets, offsets, table.longest, table.longest, **extra)
    return out


def is_dense(
    name: str,
    attend: Attend,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    rule: AttentionRule,
) -> bool:
    """Return True if a kernel matches dense attention on sequences of the lengths `PROBE`, forward and backward.

    `shape` contains query heads, key-value heads and head size. A failure or a mismatch is logged.
    """
    heads, kv_heads, size = shape
    generator = torch.Generator(device).manual_seed(0)
    given = (
        torch.randn(sum(PROBE), n, size, generator=generator, device=device, dtype=dtype)
        for n in (heads, kv_heads, kv_heads)
    )
    measure = partial(difference, attend, partial(dense, rule=rule), *given)
    return agrees(name, device, TOLERANCE, measure)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """Return attention `[T, heads, d]` over sequences of the lengths `PROBE`, densely in fp32 and without a cap."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(groups, dim=0) for x in (k, v))
    which = torch.repeat_interleave(torch.tensor(PROBE)).to(q.device)
    at = torch.arange(len(which), device=q.device)
    back = at[:, None] - at[None, :]
    seen = (which[:, None] == which) & (back >= 0) & (back < (rule.window or len(which)))
    scores = q @ k.transpose(-1, -2) * rule.scaling
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)
