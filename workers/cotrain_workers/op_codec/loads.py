"""Turn a load request into what the engine runs: its checkpoints, from memory or from disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cotrain_store.messages.saves import LoadRequest
from cotrain_workers.engine.adapters.interpolation import mix
from cotrain_workers.engine.decoding.requests import HostWeights, WeightsGone
from cotrain_workers.engine.ops import Failure, HostOptimizer, Load

if TYPE_CHECKING:
    from cotrain_store.messages.ids import WeightsRef
    from cotrain_store.messages.ops import QueuedOp
    from cotrain_workers.engine.spec import AdapterSpec, Layout


class Checkpoints(Protocol):
    """What a load asks for; both raise WeightsGone."""

    def host(self, ref: WeightsRef) -> HostWeights:
        """Give weights."""

    def optimizer(self, ref: WeightsRef) -> HostOptimizer | None:
        """Give the optimizer state that was saved with weights; None: they were saved without."""

    def layout_of(self, spec: AdapterSpec) -> Layout:
        """Return where the matrices of such an adapter lie in its arena."""


def load_op(op: QueuedOp, body: bytes, checkpoints: Checkpoints) -> Load | Failure:
    """Read what a load needs; a Failure where it is not there."""
    request = LoadRequest.parse(body)
    try:
        weights = _weights(request, checkpoints)
        optimizer = _optimizer(request, checkpoints)
    except WeightsGone:
        return Failure(f"Checkpoint {request.path} cannot be read on the server.", "server")
    if request.optimizer and optimizer is None:
        return Failure(f"Checkpoint {request.path} has no optimizer state.", "user")
    creates = request.lora is not None
    return Load(op.run, op.seq, request.path, weights, optimizer, creates)


def _weights(request: LoadRequest, checkpoints: Checkpoints) -> HostWeights:
    sources = [(source.coefficient, checkpoints.host(source.ref)) for source in request.sources]
    if len(sources) == 1 and sources[0][0] == 1.0:
        return sources[0][1]
    return mix(sources, checkpoints.layout_of)


def _optimizer(request: LoadRequest, checkpoints: Checkpoints) -> HostOptimizer | None:
    """Give the state that goes with the weights: of several sources together there is none."""
    if not request.optimizer or len(request.sources) > 1:
        return None
    return checkpoints.optimizer(request.sources[0].ref)
