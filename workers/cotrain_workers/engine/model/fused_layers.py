"""Insertion of kernels into the layers of a base model: norms, rotations and gates.

With the LoRA backend `fused`, gates and residual additions are part of the adjacent products instead. In decoding,
residual additions are, too.

A layer's computation is recognised by a pure function with identical bits. A kernel is compared with that function
before it replaces it. Otherwise the layer keeps the code of transformers, and the log says so.

`norm_then_weight` to `half_turned` are the pure functions. The kernels are in `layer_kernels.py`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional

from cotrain_workers.engine.lora.fused.operators import GELU, SILU, missing_kernels
from cotrain_workers.engine.model.activation_checkpointing import by_rows
from cotrain_workers.engine.model.base_model import BaseModel
from cotrain_workers.engine.model.kernel_check import example, is_right
from cotrain_workers.engine.model.layer_kernels import KeptNorm, RotatedNorm, gated
from cotrain_workers.engine.routing import Router

Pure = Callable[..., Any]
Norm = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Checked = dict[tuple[Any, ...], bool]  # check results of kernels, by function and sizes

#: Norms before attention and before the MLP. A layer with only these modules adds both results to its input.
NORMS = ("input_layernorm", "post_attention_layernorm")
PARTS = {*NORMS, "self_attn", "mlp"}
GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")
ROPE = "apply_rotary_pos_emb"
ROWS = 64  # rows of the examples that recognise functions and check kernels

log = logging.getLogger(__name__)


def fuse_layers(base: BaseModel, *, in_products: bool) -> tuple[str, ...]:
    """Replace parts of a base model's layers by kernels; return their names. `in_products`: LoRA is `fused`."""
    reason = missing_kernels(base.head_weight.device)
    if base.lock_step.sharding:
        reason = "its weights are shared among processes"
    if reason:
        log.warning("The base model's layers run as transformers has them, slower: %s.", reason)
        return ()
    backbone: Any = base.backbone
    named = [each for each in backbone.modules() if _is_norm(each)]
    checked: Checked = {}  # of 36 layers with a failing kernel, only one logs it
    norms = {each: _fuse_norm(each, checked) for each in named}
    gates = [_fuse_gate(getattr(each, "mlp", None), base.router, checked, in_products) for each in backbone.layers]
    done: dict[str, list[Any]] = {
        "norms": list(norms.values()),
        "heads": [base.is_plain and _fuse_heads(each.self_attn, checked) for each in backbone.layers],
        "mlp": gates,
    }
    if in_products:
        switched = base.recompute.switched
        done["residuals"] = [
            base.is_plain and is_known and _fuse_residuals(layer, norms, base.router, switched)
            for layer, is_known in zip(backbone.layers, gates, strict=True)
        ]
    for name, each in done.items():
        plain = sum(not one for one in each)
        if plain:
            log.warning("%s: %d of %d are as transformers has them", name, plain, len(each))
    return tuple(name for name, each in done.items() if any(each))


def _is_norm(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return type(module).__name__.endswith("RMSNorm") and weight is not None and weight.dim() == 1


def _once(checked: Checked, key: tuple[Any, ...], check: Callable[[], bool]) -> bool:
    if key not in checked:
        checked[key] = check()
    return checked[key]


def _fuse_norm(norm: Any, checked: Checked) -> Norm | None:
    """Replace a norm by a kernel; return the kernel, which also returns its input, or None."""
    eps, pure = _known_norm(norm)
    if pure is None:
        return None
    one = pure is norm_with_one

    def both(x: torch.Tensor) -> Any:
        return KeptNorm.apply(x, norm.weight, eps, one)  # type: ignore[no-untyped-call]

    def plain(x: torch.Tensor) -> Any:
        return pure(x, norm.weight, eps), x.view_as(x)

    def forward(x: torch.Tensor) -> Any:
        return both(x)[0]

    def check() -> bool:
        x = [example(norm.weight, ROWS, len(norm.weight))]
        return is_right(both, plain, 1, x) and is_right(forward, lambda x: plain(x)[0], 1, x)

    if not _once(checked, (pure, eps, len(norm.weight)), check):
        return None
    norm.forward = forward
    return both


def _fuse_gate(mlp: Any, router: Router, checked: Checked, in_products: bool) -> bool:
    """Replace the gate of an MLP, by a kernel in decoding and within the products in training."""
    if not all(hasattr(mlp, name) for name in GATED):
        return False
    shape = (1, ROWS, mlp.down_proj.weight.shape[1])
    both = [example(mlp.down_proj.weight, *shape) for _ in range(2)]
    pure = first_equal((silu_gate, gelu_gate), both, mlp.act_fn(both[0]) * both[1])
    if pure is None:
        return False
    gate, plain = (SILU if pure is silu_gate else GELU), mlp.forward

    def kernel(gated_by: torch.Tensor, up: torch.Tensor) -> Any:
        return gated(gated_by, up, gate)

    def by_kernel(x: torch.Tensor) -> Any:
        return mlp.down_proj(kernel(mlp.gate_proj(x), mlp.up_proj(x)))

    def product(x: torch.Tensor) -> Any:
        lora: Any = router.route.lora
        return lora.mlp(mlp.gate_proj.name, mlp.down_proj.name, gate, x)

    def by_products(x: torch.Tensor) -> Any:
        return by_rows(router, x, product)

    trained = by_products if in_products else plain
    fits = _once(checked, (pure, shape), lambda: is_right(kernel, pure, 0, both))
    decoded = by_kernel if fits else plain
    mlp.forward = lambda x: (trained if router.step is None else decoded)(x)
    return trained is not plain or decoded is not plain


def _fuse_heads(attention: Any, checked: Checked) -> bool:
    """Replace the rotation of queries and keys by a kernel, together with the norms directly before it."""
    original = type(attention).forward
    eager = getattr(original, "__globals__", {}).get(ROPE)
    if eager is None or ROPE not in original.__code__.co_names:
        return False
    like, size = attention.o_proj.weight, attention.head_dim
    both = [example(like, 1, ROWS, 2, size).transpose(1, 2) for _ in range(2)]
    angles = [example(like, 1, ROWS, size) for _ in range(2)]
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if first_equal((rotate,), (*both, *angles), eager(*both, *angles)) is None:
        return False
    of_q, of_k = (_rotation(norm, checked, (both[0], *angles)) for norm in norms)
    if of_q is None or of_k is None:
        return False

    def turned(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return of_q(q, cos, sin), of_k(k, cos, sin)

    for norm in norms:
        if norm is not None:
            norm.forward = lambda x: x
    attention.forward = _with_global(original, ROPE, turned).__get__(attention)
    return True


def _rotation(norm: Any, checked: Checked, examples: tuple[torch.Tensor, ...]) -> Any:
    """Return a kernel that normalises heads `[1, heads, T, size]`, if there is a norm, and rotates them, or None."""
    eps, pure = (0.0, None) if norm is None else _known_norm(norm)
    if norm is not None and pure is None:
        return None

    def kernel(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        weight = None if norm is None else norm.weight
        given = x.transpose(1, 2).squeeze(0), weight, cos.squeeze(0), sin.squeeze(0)
        y = RotatedNorm.apply(*given, eps, pure is norm_with_one)  # type: ignore[no-untyped-call]
        return y.unsqueeze(0).transpose(1, 2)

    def rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return rotate(x if pure is None else pure(x, norm.weight, eps), x, cos, sin)[0]

    key = rotate, pure, eps, examples[0].shape
    return kernel if _once(checked, key, lambda: is_right(kernel, rotation, 1, examples)) else None


def _fuse_residuals(layer: Any, norms: Mapping[Any, Norm | None], router: Router, asking: Callable[[Any], Any]) -> bool:
    """Add a layer's residuals inside the products before them, if its MLP computes its gate there in training."""
    if {name for name, _ in layer.named_children()} != PARTS:
        return False
    before_attention, before_mlp = (norms.get(getattr(layer, name)) for name in NORMS)
    if before_attention is None or before_mlp is None:
        return False

    def add_to(module: Any, residual: torch.Tensor) -> None:
        adder: Any = router.step or router.route.lora
        adder.add_to(module.name, residual)

    def forward(hidden_states: torch.Tensor, **rest: Any) -> Any:
        normed, kept = before_attention(hidden_states)
        add_to(layer.self_attn.o_proj, kept)
        hidden_states, _ = layer.self_attn(hidden_states=normed, **rest)
        return by_rows(router, hidden_states, mlp)

    def mlp(hidden_states: torch.Tensor) -> Any:
        normed, kept = before_mlp(hidden_states)
        add_to(layer.mlp.down_proj, kept)
        return layer.mlp(normed)

    trained = asking(forward)
    layer.forward = lambda *args, **rest: (trained if router.step is None else forward)(*args, **rest)
    return True


def _known_norm(norm: Any) -> tuple[float, Any]:
    """Return the epsilon of a norm and the matching known function, or None in its place."""
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0))
    x = example(norm.weight, ROWS, len(norm.weight))
    given = (x, norm.weight, eps)
    return eps, first_equal((norm_then_weight, norm_with_one), given, type(norm).forward(norm, x))


def norm_then_weight(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm of Llama, Mistral and Qwen, which is rounded before scaling."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def norm_with_one(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm of Gemma, which is scaled by weight + 1 before rounding."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).type_as(x)


def silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the gated product of Llama, Mistral and Qwen."""
    return functional.silu(gate) * up


def gelu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the gated product of Gemma."""
    return functional.gelu(gate, approximate="tanh") * up


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `q` and `k` `[1, heads, T, d]` rotated by `cos` and `sin` `[1, T, d]`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + half_turned(q) * sin, k * cos + half_turned(k) * sin


def half_turned(x: torch.Tensor) -> torch.Tensor:
    """Return `(-b, a)` of the halves `(a, b)` of the last dimension."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def first_equal(candidates: Sequence[Pure], inputs: Sequence[Any], expected: Any) -> Pure | None:
    """Return the first candidate whose result has the bits of the model's own function, or None."""
    wanted = expected if isinstance(expected, tuple) else (expected,)
    for pure in candidates:
        found = pure(*inputs)
        pairs = zip(found if isinstance(found, tuple) else (found,), wanted, strict=True)
        if all(torch.equal(*pair) for pair in pairs):
            return pure
    return None


def _with_global(function: Any, name: str, value: Any) -> Any:
    """Return a copy of a function with another value for one global name."""
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, name: value},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
