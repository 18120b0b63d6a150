"""One step of training as one call: a forward_backward and the optim_step behind it, sent together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from cotrain.requests.futures import Future

if TYPE_CHECKING:
    from cotrain.requests.event_loop_thread import BackgroundLoop
    from cotrain.wire.runs import ForwardBackwardOutput, OptimStepResponse
    from cotrain.wire.tensors import TensorData

T = TypeVar("T")


@dataclass(frozen=True)
class TrainOutput:
    """What a step gave: the pass's losses, taken before the step, and the step's own numbers."""

    forward_backward: ForwardBackwardOutput
    optim_step: OptimStepResponse

    @property
    def loss(self) -> float:
        """The loss of the batch; see `ForwardBackwardOutput.loss`."""
        return self.forward_backward.loss

    @property
    def loss_fn_outputs(self) -> list[dict[str, TensorData]]:
        """Named arrays per datum in the order they were sent, as `forward_backward` gives them."""
        return self.forward_backward.loss_fn_outputs

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers of both; a name that both have is the pass's."""
        return {**(self.optim_step.metrics or {}), **self.forward_backward.metrics}


def joined(
    loop: BackgroundLoop, passed: Future[ForwardBackwardOutput], stepped: Future[OptimStepResponse]
) -> Future[TrainOutput]:
    """Make one future of both: accepted and done when both are. It fails with the first that does."""

    async def accept() -> None:
        await passed.accepted_async()
        await stepped.accepted_async()

    async def finish() -> TrainOutput:
        return TrainOutput(await passed, await stepped)

    return Future(loop.start(accept()), loop.start(finish()), what="a train call")
