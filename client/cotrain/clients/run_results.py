"""Results of several requests of a run: training steps and evaluations. Also own metrics, and rewinds."""

from __future__ import annotations

import math
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from typing_extensions import override

from cotrain.errors import UnsupportedInput
from cotrain.requests.connection import BackgroundLoop
from cotrain.requests.flow_control import combine
from cotrain.requests.futures import Future, submitted
from cotrain.requests.run_requests import RunRequests
from cotrain.wire.datums import Datum, ForwardBackwardOutput, datums_of
from cotrain.wire.rest import LogMetricsRequest, LogMetricsResponse, RewindRequest, RewindResponse
from cotrain.wire.runs import OptimStepResponse
from cotrain.wire.tensors import TensorData

T = TypeVar("T")


@dataclass(frozen=True)
class TrainOutput:
    """Result of a training step: the losses of the pass, before the update, and the optimizer's metrics."""

    forward_backward: ForwardBackwardOutput
    optim_step: OptimStepResponse

    @property
    def loss(self) -> float:
        """The loss of the batch; see `ForwardBackwardOutput.loss`."""
        return self.forward_backward.loss

    @property
    def loss_fn_outputs(self) -> list[dict[str, TensorData]]:
        """Named arrays for each datum in the order sent, as in `ForwardBackwardOutput`."""
        return self.forward_backward.loss_fn_outputs

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of both requests. If both have a name, the pass's value is returned."""
        return {**(self.optim_step.metrics or {}), **self.forward_backward.metrics}


@dataclass(frozen=True)
class Evaluation:
    """Result of `run.evaluate`."""

    loss_sum: float
    """Sum of the loss over all datums."""
    weight_sum: float
    """Sum of the weights, or the number of non-zero advantages if the loss has no weights."""
    tokens: int
    """Number of targets with a non-zero weight or advantage."""
    loss_fn_outputs: list[dict[str, TensorData]]
    """Named arrays for each datum in the order sent, as in `ForwardBackwardOutput`."""

    @property
    def loss(self) -> float:
        """Loss per weight; the sum if the weights sum to 0."""
        return self.loss_sum / self.weight_sum if self.weight_sum > 0 else self.loss_sum

    @property
    def nll(self) -> float:
        """Negative log-likelihood in nats per token, of `cross_entropy`; the same number as `loss`."""
        return self.loss

    @override
    def __repr__(self) -> str:
        return f"Evaluation(loss={self.loss:.6g}, tokens={self.tokens})"


class RunRecords:
    """Calls of a run that the hosted services lack: evaluations, own metrics and rewinds."""

    _loop: BackgroundLoop
    _requests: RunRequests

    def rewind(self, step: int) -> Future[RewindResponse]:
        """Return this run to its state after optimizer step `step`, at this position in the order.

        On a CPU, weights, both Adam moments and later steps are then equal to the bit to those of a run that
        ended at `step`. A pending gradient and the history after it are dropped, checkpoints stay. The
        future raises RequestFailed, with the steps within reach, for a step that the log does not hold.
        """
        return self._requests.post("rewind", RewindRequest, RewindResponse, step=step)

    rewind_async = submitted(rewind)

    def log(self, metrics: Mapping[str, float]) -> Future[LogMetricsResponse]:
        """Record own metrics at this position in the run's order, such as `{"reward/mean": 0.4}`.

        They are kept with the run's history, drawn on its page, and stored with checkpoints that are saved
        before the next optimizer step. Values are finite numbers. There are at most 64 in a call, and 128
        names in a run. Raises UnsupportedInput for another value, ValidationError for an invalid name.
        """
        return self._log(metrics=_numbers_of(metrics))

    log_async = submitted(log)

    def evaluate(
        self,
        data: Sequence[Datum],
        loss_fn: str = "cross_entropy",
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        name: str = "eval",
    ) -> Future[Evaluation]:
        """Compute the loss on a data set of any size without a gradient, in the cycles of other runs' training.

        The history receives it as the metric `<name>/nll` for cross_entropy, `<name>/loss` for other
        losses. If a request of the evaluation fails, or another thread uses the run during it, the
        history has no value. Raises UnsupportedInput for empty data.
        """
        data = datums_of(data)
        if not data:
            raise UnsupportedInput("data is empty: an evaluation needs at least one Datum")
        metric = f"{name}/{'nll' if loss_fn == 'cross_entropy' else 'loss'}"
        started = self._log(evaluation=metric)
        passes = self._requests.forwards_over(data, loss_fn, loss_fn_config)
        ended = self._log(evaluation=metric, passes=len(passes))
        weight_sum, tokens = _weights_of(data)

        async def finish() -> Evaluation:
            outputs = [await each for each in passes]
            await started
            await ended
            whole = combine(outputs)
            return Evaluation(whole.metrics["loss:sum"], weight_sum, tokens, whole.loss_fn_outputs)

        return joined(self._loop, (started, ended, *passes), finish(), what="an evaluation")

    evaluate_async = submitted(evaluate)

    def _log(self, **what: Any) -> Future[LogMetricsResponse]:
        return self._requests.post("log_metrics", LogMetricsRequest, LogMetricsResponse, **what)


def joined(
    loop: BackgroundLoop, parts: Sequence[Future[Any]], result: Coroutine[Any, Any, T], *, what: str
) -> Future[T]:
    """Return a future that is accepted when all parts are. It fails with the first failure of a part."""

    async def accept() -> None:
        for each in parts:
            await each.accepted_async()

    return Future(loop.start(accept()), loop.start(result), what=what)


def _weights_of(data: Sequence[Datum]) -> tuple[float, int]:
    """Return the sum of the weights of datums, and the number of targets that count."""
    total, count = 0.0, 0
    for datum in data:
        inputs = datum.loss_fn_inputs
        weights = inputs.get("weights")
        if weights is not None:
            total += math.fsum(weights.data)
            count += sum(weight != 0 for weight in weights.data)
            continue
        rewards = inputs.get("advantages")
        values = inputs["target_tokens"].data if rewards is None else rewards.data
        counted = len(values) if rewards is None else sum(value != 0 for value in values)
        total, count = total + counted, count + counted
    return total, count


def _numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as finite floats. Raises UnsupportedInput, which names the metric."""
    found = {}
    for name, value in metrics.items():
        try:
            number = float(value)  # of Python, NumPy and torch
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise UnsupportedInput(f"metrics[{name!r}] is {value!r:.80}: it must be a finite number")
        found[name] = number
    return found
