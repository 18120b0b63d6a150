"""Which backend computes the LoRA paths of a micro-batch: `seg`, `grouped` or `fused`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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
from cotrain_workers.engine.lora.segmented import SegmentLora
from cotrain_workers.engine.lora.self_check import TARGETS, WIDE_TARGETS, disagreement
from cotrain_workers.engine.routing import LinearWeights, Segment, Source, TrainingLora
from cotrain_workers.engine.spec import Target

Choice = Literal["auto", "seg", "grouped", "fused"]

FEW_SEGMENTS, LONG_SEGMENT = 2, 4096
# Of these generations torch has a kernel; on others it loops, and waits for the device to know how often.
GROUPED_KERNEL = (9, 10)

log = logging.getLogger(__name__)


#: What says that kernels do not run on a device, or cannot be built on its host: of drivers, linkers and compilers.
UNFIT = (RuntimeError, OSError, ImportError, SubprocessError)
#: The same of Triton, by name, as one module alone imports it: too little shared memory, no assembler.
UNFIT_NAMES = frozenset(["OutOfResources", "PTXASError"])


class BackendUnfit(ValueError):
    """The LoRA backend that was asked for cannot be used here; the message says why."""


class KernelsBroken(Exception):
    """The fused LoRA kernels failed in a way that is a fault of theirs, and not of the device."""


@dataclass(frozen=True)
class LoraBackend:
    """How an engine computes LoRA."""

    name: Choice  # part of the numerics
    dtype: torch.dtype  # of the base model
    groups: Sequence[ModuleGroup] = ()  # of the base model, for `fused`
    linears: Mapping[str, LinearWeights] = field(default_factory=dict, repr=False, compare=False)
    fallback_reason: str = field(default="", compare=False)
    """Why this device does without a faster backend, if it does."""

    @property
    def stores_first(self) -> bool:
        """Return whether stale sums are written over (`kept_share`); else they are to be zeros."""
        return self.name == "seg"

    @property
    def align(self) -> int:
        """Return what every segment's first row is a multiple of."""
        return 1 if self.name in ("seg", "fused") else ROWS

    def order(self, source: Source) -> Any:
        """Return what the segments of a micro-batch are to be sorted by."""
        return () if self.name in ("seg", "fused") else stack_class(source.layout)

    def of(self, segments: Sequence[Segment], rows: int) -> TrainingLora:
        """Return the LoRA paths of one micro-batch of `rows`, padded."""
        if self.name == "fused":
            return FusedLora(segments, rows, self.groups, self.linears)
        backend = choose(len(segments), rows) if self.name == "auto" else self.name
        return (
            SegmentLora(segments) if backend == "seg" else GroupedLora(segments, rows, self.dtype)
        )


def choose(segments: int, tokens: int) -> Literal["seg", "grouped"]:
    """Return the backend for a micro-batch on CUDA, where either may run.

    Calculated, not measured: per module and pass forward and back, `seg` launches 7 kernels a segment and
    `grouped` about 13 in all, at 4 to 5 us each. Segments of 4,096 tokens hide that behind the base model
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
) -> LoraBackend:
    """Return the backend for a base model, of whose weights `weight` is one, and `linears` the modules by name.

    "auto" is `seg` on a CPU, whatever the micro-batch. On CUDA it is `fused` where its kernels are right, else
    `grouped` or `seg` by micro-batch, else `seg`, and says why. Raises BackendUnfit, KernelsBroken.
    """
    if choice == "seg" or (choice == "auto" and not weight.is_cuda):
        return LoraBackend("seg", weight.dtype)
    not_fused = ""
    if choice in ("auto", "fused"):
        reason = unfused(weight)
        if not reason:
            return LoraBackend("fused", weight.dtype, plan_groups(targets), linears)
        if choice == "fused":
            raise BackendUnfit(f"LoRA backend 'fused' cannot be used: {reason}.")
        not_fused = f"not fused: {reason}"
        log.warning("LoRA is not fused with the base model's products, slower: %s.", reason)
    reason = unfit(targets, weight.dtype) or disagreement(weight.device, weight.dtype)
    if choice == "grouped":
        if reason:
            raise BackendUnfit(f"LoRA backend 'grouped' cannot be used: {reason}.")
        return LoraBackend("grouped", weight.dtype)
    reason = reason or slow(weight)
    if reason:
        log.warning("LoRA is a loop over adapters, slow with many of them: %s.", reason)
        both = f"{not_fused}; not grouped: {reason}"
        return LoraBackend("seg", weight.dtype, fallback_reason=both)
    return LoraBackend("auto", weight.dtype, fallback_reason=not_fused)


def unfused(weight: torch.Tensor) -> str | None:
    """Return why the fused kernels cannot be used here, or None: each was compared with `seg` on the device.

    Raises KernelsBroken, DeviceLost.
    """
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its kernels do not take {weight.dtype}"
    reason = missing_kernels(weight.device)
    if reason:
        return reason
    # On a CPU, where kernels are interpreted, the wide ones take minutes.
    sizes = [TARGETS, WIDE_TARGETS] if weight.device.type == "cuda" else [TARGETS]
    try:
        found = [
            disagreement(weight.device, weight.dtype, backend="fused", targets=own) for own in sizes
        ]
        return next((reason for reason in found if reason), None)
    except Exception as error:  # a compiler's, of any type
        check_device(weight.device)
        name = type(error).__name__
        if not isinstance(error, UNFIT) and name not in UNFIT_NAMES:
            raise KernelsBroken(f"{name}: {error}") from error
        log.warning("The fused LoRA kernels do not run here", exc_info=True)
        return f"its kernels do not run: {name}"


def unfit(targets: Sequence[Target], dtype: torch.dtype) -> str | None:
    """Return why grouped products cannot take the modules of a base model, or None."""
    if not hasattr(functional, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"grouped_mm does not take {dtype}"
    for target in targets:
        # Strides are multiples of 16 bytes. The unembedding is not among its products.
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
