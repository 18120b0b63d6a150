"""Selection of the backend that computes the LoRA paths of a micro-batch: `seg`, `grouped` or `fused`."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from subprocess import SubprocessError
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.nn import functional

from cotrain_workers.engine.device import check_device
from cotrain_workers.engine.lora.fused.fused_lora import FusedLora
from cotrain_workers.engine.lora.fused.operators import missing_kernels
from cotrain_workers.engine.lora.fused.tables import ModuleGroup, plan_groups
from cotrain_workers.engine.lora.grouped import MIN_RANK, ROWS, GroupedLora, stack_class
from cotrain_workers.engine.lora.quantized import QuantizedWeight
from cotrain_workers.engine.lora.segmented import SegmentLora
from cotrain_workers.engine.lora.self_check import TARGETS, WIDE_TARGETS, disagreement, faster_than_fused, layer_seconds
from cotrain_workers.engine.routing import LinearWeights, Segment, Source, TrainingLora
from cotrain_workers.engine.spec import Target, has_experts

Choice = Literal["auto", "seg", "grouped", "fused"]
#: Return the result of kernels on a device that is wrong, or None.
Check = Callable[[torch.device, torch.dtype], str | None]

FEW_SEGMENTS, LONG_SEGMENT = 2, 4096
# Major compute capabilities with a torch kernel; on others torch loops and synchronizes to read the group sizes.
GROUPED_KERNEL = (9, 10)

EXPERTS = "only 'seg' and 'fused' compute the experts of a mixture-of-experts model"

log = logging.getLogger(__name__)


#: Errors of drivers, linkers and compilers when kernels do not run on a device or do not build on its host.
UNFIT = (RuntimeError, OSError, ImportError, SubprocessError)
#: The same for Triton, by name, because only one module imports it: too little shared memory, no assembler.
UNFIT_NAMES = frozenset(["OutOfResources", "PTXASError"])


class BackendUnfit(ValueError):
    """The requested LoRA backend cannot be used; the message contains the reason."""


class KernelsBroken(Exception):
    """The fused LoRA kernels failed because of a defect of their own, not of the device."""


@dataclass(frozen=True)
class LoraBackend:
    """LoRA backend of an engine and its parameters."""

    name: Choice  # part of the numerics
    dtype: torch.dtype  # of the base model
    groups: Sequence[ModuleGroup] = ()  # of the base model, for `fused`
    linears: Mapping[str, LinearWeights] = field(default_factory=dict, repr=False, compare=False)
    fallback_reason: str = field(default="", compare=False)
    """Reason why this device does not use a faster backend, if there is one."""

    @property
    def stores_first(self) -> bool:
        """True if stale sums are overwritten (`kept_share`); otherwise the caller must zero them."""
        return self.name == "seg"

    @property
    def align(self) -> int:
        """Multiple to which the first row of every segment is aligned."""
        return 1 if self.name in ("seg", "fused") else ROWS

    def order(self, source: Source) -> Any:
        """Return the sort key of the segments of a micro-batch."""
        return () if self.name in ("seg", "fused") else stack_class(source.layout)

    def of(self, segments: Sequence[Segment], rows: int) -> TrainingLora:
        """Return the LoRA paths of one micro-batch with `rows` padded rows."""
        if self.name == "fused":
            return FusedLora(segments, rows, self.groups, self.linears)
        backend = choose(len(segments), rows) if self.name == "auto" else self.name
        return SegmentLora(segments) if backend == "seg" else GroupedLora(segments, rows, self.dtype)


def choose(segments: int, tokens: int) -> Literal["seg", "grouped"]:
    """Return the backend for a micro-batch on CUDA, where either may run.

    Calculated, not measured: per module, forward and backward, `seg` launches 7 kernels per segment and
    `grouped` about 13 in total, at 4 to 5 us each. Segments of 4,096 tokens hide that behind the base model
    (a 4096 x 4096 module: 0.17 ms forward at 790 TFLOP/s), and then `seg` copies no weights.
    """
    if segments <= FEW_SEGMENTS or tokens >= LONG_SEGMENT * segments:
        return "seg"
    return "grouped"


def find_backend(
    choice: Choice,
    targets: Sequence[Target],
    weight: torch.Tensor,
    linears: Mapping[str, LinearWeights] = MappingProxyType({}),
    *,
    times: bool = True,
    unfused_experts: str = "",
    check_experts: Check | None = None,
) -> LoraBackend:
    """Return the backend for a base model. `weight` is one of its weights, `linears` its modules by name.

    `unfused_experts` is the reason why its experts cannot be fused, if there is one. `check_experts` checks their
    kernels.

    "auto" is `seg` on a CPU for every micro-batch. On CUDA it is `fused` if its kernels are correct, and with `times`
    also if `grouped` is not clearly faster on a layer of this model. Otherwise it is `grouped` or `seg` by
    micro-batch, else `seg`; the log contains the reason. Raises BackendUnfit, KernelsBroken.
    """
    if choice == "seg" or (choice == "auto" and not weight.is_cuda):
        return LoraBackend("seg", weight.dtype)
    mixture = has_experts(targets)
    if choice == "grouped":
        if reason := EXPERTS if mixture else ungrouped(targets, weight):
            raise BackendUnfit(f"LoRA backend 'grouped' cannot be used: {reason}.")
        return LoraBackend("grouped", weight.dtype)
    not_fused = unfused_experts or quantized(linears) or unfused(weight, check_experts)
    if not_fused and choice == "fused":
        raise BackendUnfit(f"LoRA backend 'fused' cannot be used: {not_fused}.")
    not_grouped = None
    if choice == "auto" and (not_fused or times):
        not_grouped = EXPERTS if mixture else slow(weight) or ungrouped(targets, weight)
        if not (not_fused or not_grouped):
            not_fused = slower(targets, weight, linears)
    if not not_fused:
        return LoraBackend("fused", weight.dtype, plan_groups(targets), linears)
    log.warning("LoRA is not fused with the base model's products: %s.", not_fused)
    if not_grouped:
        log.warning("LoRA is a loop over adapters, slow with many of them: %s.", not_grouped)
        both = f"not fused: {not_fused}; not grouped: {not_grouped}"
        return LoraBackend("seg", weight.dtype, fallback_reason=both)
    return LoraBackend("auto", weight.dtype, fallback_reason=f"not fused: {not_fused}")


def quantized(linears: Mapping[str, LinearWeights]) -> str:
    """Return why kernels with plain weights cannot be used, or an empty string."""
    is_quantized = any(isinstance(each.weight, QuantizedWeight) for each in linears.values())
    return "the base model is quantized" if is_quantized else ""


def ungrouped(targets: Sequence[Target], weight: torch.Tensor) -> str | None:
    """Return why grouped products cannot be used, or None if they match `seg` on this device."""
    return unfit(targets, weight.dtype) or disagreement(weight.device, weight.dtype)


def slower(targets: Sequence[Target], weight: torch.Tensor, linears: Mapping[str, LinearWeights]) -> str:
    """Return why `fused` is slower than `grouped` on this device, or an empty string."""

    def fused(segments: Sequence[Segment], rows: int, layer: Sequence[Target]) -> TrainingLora:
        return FusedLora(segments, rows, plan_groups(layer), linears)

    def grouped(segments: Sequence[Segment], rows: int, _layer: Sequence[Target]) -> TrainingLora:
        return GroupedLora(segments, rows, weight.dtype)

    ways = {"fused": fused, "grouped": grouped}
    try:
        seconds = layer_seconds(ways, targets, linears, weight.device, weight.dtype)
    except UNFIT:  # too little memory, for example
        check_device(weight.device)
        log.warning("LoRA backends could not be timed; LoRA is fused", exc_info=True)
        return ""
    log.info(
        "LoRA backends were timed on one layer: %s.",
        ", ".join(f"{name} {time * 1e3:.2f} ms" for name, time in seconds.items()),
    )
    return faster_than_fused(seconds)


def unfused(weight: torch.Tensor, check_experts: Check | None = None) -> str | None:
    """Return why the fused kernels cannot be used, or None if each matches `seg` on this device.

    `check_experts` is the check of those of a mixture of experts.

    Raises KernelsBroken, DeviceLost.
    """
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its kernels do not take {weight.dtype}"
    if reason := missing_kernels(weight.device):
        return reason
    # On a CPU, kernels are interpreted, and the wide sizes take minutes.
    sizes = [TARGETS, WIDE_TARGETS] if weight.device.type == "cuda" else [TARGETS]
    try:
        found = [disagreement(weight.device, weight.dtype, backend="fused", targets=own) for own in sizes]
        if check_experts is not None:
            found.append(check_experts(weight.device, weight.dtype))
        return next(filter(None, found), None)
    except Exception as error:  # compilers raise exceptions of any type
        check_device(weight.device)
        name = type(error).__name__
        if not isinstance(error, UNFIT) and name not in UNFIT_NAMES:
            raise KernelsBroken(f"{name}: {error}") from error
        log.warning("The fused LoRA kernels do not run here", exc_info=True)
        return f"its kernels do not run: {name}"


def unfit(targets: Sequence[Target], dtype: torch.dtype) -> str | None:
    """Return why grouped products cannot process the modules of a base model, or None."""
    if not hasattr(functional, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"grouped_mm does not take {dtype}"
    for target in targets:
        # Strides are multiples of 16 bytes. The unembedding does not use grouped products.
        if target.family != "unembed" and (target.inputs % MIN_RANK or target.outputs % MIN_RANK):
            sizes = f"{target.inputs} x {target.outputs}"
            return f"{target.name} is {sizes}, not of multiples of {MIN_RANK}"
    return None


def slow(weight: torch.Tensor) -> str | None:
    """Return why torch has no kernel for grouped products of such weights, or None."""
    major, minor = torch.cuda.get_device_capability(weight.device)
    if weight.dtype != torch.bfloat16:
        return f"torch has a kernel for grouped products of bfloat16, not of {weight.dtype}"
    if major not in GROUPED_KERNEL:
        return f"torch has no kernel for grouped products on a device of capability {major}.{minor}"
    return None
