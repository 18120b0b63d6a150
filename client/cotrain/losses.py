"""Losses over pairs of datums, for `forward_backward_custom`.

A pair is two datums in sequence, the chosen answer before the rejected one. `weights` mark the tokens of the answers.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from cotrain.errors import UnsupportedInput
from cotrain.wire.datums import Datum

__all__ = ["orpo"]


def orpo(weight: float = 0.1) -> Callable[[Sequence[Datum], Sequence[Any]], tuple[Any, dict[str, float]]]:
    """Return the odds-ratio preference loss (Hong et al., 2024, equations 6 and 7, arXiv:2403.07691), summed over pairs.

    With `m` the mean log-prob of an answer's tokens, the loss of a pair is `-m(chosen) + weight * -log sigmoid(odds(chosen) -
    odds(rejected))`, where `odds = m - log(1 - exp(m))`. It needs no reference model. The loss raises UnsupportedInput
    for an odd number of datums, or a datum without an answer.
    """

    def loss(data: Sequence[Datum], logprobs: Sequence[Any]) -> tuple[Any, dict[str, float]]:
        torch = import_module("torch")
        if len(data) % 2:
            raise UnsupportedInput(f"orpo needs pairs of datums, not {len(data)} datums")
        means = []
        for number, (datum, row) in enumerate(zip(data, logprobs, strict=True)):
            weights = datum.loss_fn_inputs.get("weights")
            answer = None if weights is None else weights.to_torch() != 0
            if answer is None or not answer.any():
                raise UnsupportedInput(f"data[{number}].loss_fn_inputs.weights mark no answer")
            means.append(row[answer].mean())
        mean = torch.stack(means)
        odds = mean - torch.log1p(-torch.exp(mean))
        margin = odds[0::2] - odds[1::2]
        ratio = -torch.nn.functional.logsigmoid(margin).sum()
        metrics = {"margin:mean": float(margin.detach().mean()), "odds_ratio:sum": float(ratio.detach())}
        return -mean[0::2].sum() + weight * ratio, metrics

    return loss
