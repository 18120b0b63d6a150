"""What each loss needs from a request: its inputs and its numbers. The engine holds the formulas."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

TARGETS = "target_tokens"


@dataclass(frozen=True)
class LossNeeds:
    """What a request must bring for one loss."""

    inputs: tuple[str, ...]
    """Required loss inputs other than `target_tokens`, one float per target."""
    config: frozenset[str] = field(default_factory=frozenset)
    """Numbers it may set in `loss_fn_config`; all are at least 0."""
    bounds_surrogate: bool = False
    """Whether a ratio out of bounds has no gradient, so that the bounds must enclose 1."""
    takes_columns: bool = False
    """Whether targets may be `(N, K)`: K weighted targets per position."""


_CLIP = frozenset({"clip_low_threshold", "clip_high_threshold"})
_POLICY = ("logprobs", "advantages")

NEEDS_BY_LOSS: Mapping[str, LossNeeds] = MappingProxyType(
    {
        "cross_entropy": LossNeeds(("weights",), takes_columns=True),
        "importance_sampling": LossNeeds(_POLICY),
        "ppo": LossNeeds(_POLICY, _CLIP, bounds_surrogate=True),
        "cispo": LossNeeds(_POLICY, _CLIP),
        "dro": LossNeeds(_POLICY, frozenset({"beta"})),
        "gspo": LossNeeds((*_POLICY, "sequence_ratio_mask"), _CLIP, bounds_surrogate=True),
    }
)
