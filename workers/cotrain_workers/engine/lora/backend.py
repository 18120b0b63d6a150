"""Selection of the backend that computes the LoRA paths of micro-batches: `seg` or `fused`."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from subprocess import SubprocessError
from types import MappingProxyType
from typing import Literal

import torch

from cotrain_workers.engine.device import check_device
from cotrain_workers.engine.lora.fused.fused_lora import FusedLora
from cotrain_workers.engine.lora.fused.operators import missing_kernels
from cotrain_workers.engine.lora.fused.tables import ModuleGroup, plan_groups
from cotrain_workers.engine.lora.segmented import SegmentLora
from cotrain_workers.engine.lora.self_check import TARGETS, WIDE_TARGETS, disagreement
from cotrain_workers.engine.routing import LinearWeights, Segment, TrainingLora
from cotrain_workers.engine.spec import Target

BackendName = Literal["seg", "fused"]
BackendChoice = Literal["auto"] | BackendName
#: Return the result of kernels on a device that is wrong, or None.
Check = Callable[[torch.device, torch.dtype], str | None]

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
    """LoRA backend of an engine."""

    name: BackendName  # part of the numerics
    groups: Sequence[ModuleGroup] = ()  # of the base model, for `fused`
    linears: Mapping[str, LinearWeights] = field(default_factory=dict, repr=False, compare=False)
    fallback_reason: str = field(default="", compare=False)
    """Reason why this device does not use the faster backend, if there is one."""

    @property
    def stores_first(self) -> bool:
        """True if stale sums are overwritten (`kept_share`); otherwise the caller must zero them."""
        return self.name == "seg"

    def of(self, segments: Sequence[Segment], rows: int) -> TrainingLora:
        """Return the LoRA paths of one micro-batch with `rows` padded rows."""
        return FusedLora(segments, rows, self.groups, self.linears) if self.name == "fused" else SegmentLora(segments)


def find_backend(
    wanted: BackendChoice,
    targets: Sequence[Target],
    weight: torch.Tensor,
    linears: Mapping[str, LinearWeights] = MappingProxyType({}),
    *,
    unfused_experts: str = "",
    check_experts: Check | None = None,
) -> LoraBackend:
    """Return the backend for a base model. `weight` is one of its weights, `linears` its modules by name.

    `unfused_experts` is the reason why its experts cannot be fused, if there is one. `check_experts` checks their
    kernels.

    "auto" is `seg` on a CPU. On CUDA it is `fused` if its kernels are correct, else `seg`; the log contains the reason.
    Raises BackendUnfit, KernelsBroken.
    """
    if wanted == "seg" or (wanted == "auto" and not weight.is_cuda):
        return LoraBackend("seg")
    reason = unfused_experts or unfused(weight, check_experts)
    if not reason:
        return LoraBackend("fused", plan_groups(targets), linears)
    if wanted == "fused":
        raise BackendUnfit(f"LoRA backend 'fused' cannot be used: {reason}.")
    log.warning(
        "LoRA is not fused with the base model's products: %s. It is a loop over adapters, slow with many.", reason
    )
    return LoraBackend("seg", fallback_reason=f"not fused: {reason}")


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
        found = [disagreement(weight.device, weight.dtype, own) for own in sizes]
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
