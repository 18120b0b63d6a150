"""Which backend computes the LoRA paths of a micro-batch: `seg`, `grouped`, or whichever is faster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from cotrain_workers.lora import SegmentLora

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from cotrain_workers.route import Segment, Source, TrainingLora
    from cotrain_workers.spec import Target

Backend = Literal["seg", "grouped"]
Choice = Literal["auto", "seg", "grouped"]


@dataclass(frozen=True)
class LoraBackend:
    """How an engine computes LoRA. Its name is part of the numerics."""

    name: Choice
    align: int = 1  # rows that every segment starts at a multiple of

    def order(self, source: Source) -> Any:
        """Return what the segments of a micro-batch are best sorted by."""
        return 0

    def of(self, segments: Sequence[Segment]) -> TrainingLora:
        """Return the LoRA paths of one micro-batch."""
        return SegmentLora(segments)


def find_backend(choice: Choice, targets: Sequence[Target], weight: torch.Tensor) -> LoraBackend:
    """Return the backend for a base model, of whose weights `weight` is one."""
    return LoraBackend("seg")
