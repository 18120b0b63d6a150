"""Result of a training step: of a pass and the optimizer step sent with it."""

from dataclasses import dataclass

from cotrain.requests.connection import BackgroundLoop
from cotrain.requests.futures import Future
from cotrain.wire.datums import ForwardBackwardOutput
from cotrain.wire.runs import OptimStepResponse
from cotrain.wire.tensors import TensorData


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


def joined(
    loop: BackgroundLoop, passed: Future[ForwardBackwardOutput], stepped: Future[OptimStepResponse]
) -> Future[TrainOutput]:
    """Combine both futures into one, accepted and done when both are. It fails with the first failure."""

    async def accept() -> None:
        await passed.accepted_async()
        await stepped.accepted_async()

    async def finish() -> TrainOutput:
        return TrainOutput(await passed, await stepped)

    return Future(loop.start(accept()), loop.start(finish()), what="a train call")
