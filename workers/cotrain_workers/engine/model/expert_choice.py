"""Choice of experts: the router's own one, or given experts in its place (`routed_experts`).

Each family computes weights in its own way from the scores of its router, after `topk` has chosen. While experts are
given, `topk` of the router returns them with their own scores. So the code of the family computes their weights, with
gradients. Tokens without given experts have the same bits as without replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from cotrain_workers.engine.routing import Router

#: Expert of a token whose experts the router chooses.
NOT_GIVEN = -1


class ExpertChoices(NamedTuple):
    """Numbers of experts that the routers of a model choose from."""

    layers: int  # layers with experts
    chosen: int  # experts of each token
    experts: int  # of each layer


def expert_choices(config: Any, experts: Sequence[int]) -> ExpertChoices | None:
    """Return the sizes of a model's choices; `experts` are the numbers of experts of its layers.

    Returns None without experts, or if layers differ in a number.
    """
    names = "num_experts_per_tok", "moe_topk", "top_k_experts"
    count = next(filter(None, (getattr(config, name, None) for name in names)), None)
    chosen = set(count) if isinstance(count, list | tuple) else {count}
    if len(set(experts)) != 1 or len(chosen) != 1:
        return None
    (k,) = chosen
    return ExpertChoices(len(experts), k, experts[0]) if isinstance(k, int) else None


def experts_of_rows(
    choices: ExpertChoices | None, rows: int, given: Iterable[tuple[int, np.ndarray]]
) -> np.ndarray | None:
    """Return the given experts of the rows of a packed row, int16 `[layers, T, k]`; None if there are none.

    `given` contains first rows, and the experts `[n, layers, k]` of the rows from there on.
    """
    found = None
    for start, experts in given:
        if choices is None:
            break
        if found is None:
            found = np.full((choices.layers, rows, choices.chosen), NOT_GIVEN, np.int16)
        found[:, start : start + len(experts)] = experts.swapaxes(0, 1)
    return found


class GivenExperts(TorchFunctionMode):
    """Context in which a router chooses the given experts.

    A function that chooses has scores `[T, experts]`. Phi-3.5-MoE chooses one expert at a time, by `max`. A
    function with scores `[T, groups]` chooses groups of experts, which then include those of the given ones.
    """

    def __init__(self, given: torch.Tensor, experts: int) -> None:
        """Replace the choice by `given` `[T, k]`; a token without given experts has NOT_GIVEN."""
        super().__init__()
        self._given = given
        self._is_given = given >= 0
        self._experts = experts
        self._maxima = 0  # experts that `max` has chosen

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, with another choice if it chooses experts or groups of them."""
        settings = dict(kwargs or {})
        own = func(*args, **settings)
        tokens, chosen = self._given.shape
        if func in (torch.topk, torch.Tensor.topk) and args[0].dim() == 2 and len(args[0]) == tokens:
            groups = args[0].shape[1]
            if groups == self._experts and own.indices.shape[1] == chosen:
                return self._replaced(args[0], own, slice(None))
            if groups < self._experts and self._experts % groups == 0:
                return func(self._with_groups(args[0]), *args[1:], **settings)
        if (
            func in (torch.max, torch.Tensor.max)
            and settings.get("keepdim")
            and args[0].shape == (tokens, self._experts)
            and self._maxima < chosen
        ):
            self._maxima += 1
            return self._replaced(args[0], own, slice(self._maxima - 1, self._maxima))
        return own

    def _replaced(self, scores: torch.Tensor, own: Any, columns: slice) -> Any:
        """Return a choice with the given experts, and their scores."""
        index = torch.where(self._is_given[:, columns], self._given[:, columns], own.indices)
        return type(own)((scores.gather(1, index), index))

    def _with_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """Return scores of groups `[T, groups]` in which those of the given experts are the highest."""
        groups = self._given.clamp(min=0) // (self._experts // scores.shape[1])
        has_given = torch.zeros_like(scores, dtype=torch.bool)
        has_given.scatter_(1, groups, self._is_given)
        return scores.masked_fill(has_given & self._is_given[:, :1], torch.inf)


def replay(block: Any, router: Router, number: int, experts: int) -> None:
    """Replace the `forward` of a module with a router and its experts by one that takes given experts.

    `number` counts the layers with experts.
    """
    forward = block.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        given = None if router.step else router.route.experts
        if given is None:
            return forward(*args, **kwargs)
        with GivenExperts(given[number].long(), experts):
            return forward(*args, **kwargs)

    block.forward = run
