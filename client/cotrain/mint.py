"""Functions of the `mint` SDK with its names: `from cotrain import mint as mintx`.

Both are also methods of cotrain's clients, which return futures. Here, as in that SDK, the client is the
first argument, and the plain call waits for its result. See `docs/guide/reverse-kl.md` for the definitions.
"""

from collections.abc import Sequence

from cotrain.clients.service import ServiceClient
from cotrain.clients.training import TrainingClient
from cotrain.requests.futures import Submitted
from cotrain.wire.runs import InterpolateResponse, ReverseKlDatum, ReverseKlItem, ReverseKlResponse

# The SDK's own names.
ReverseKLDatum = ReverseKlDatum
ReverseKLItemOutput = ReverseKlItem
ForwardBackwardReverseKLResponse = ReverseKlResponse
InterpolateCheckpointsResponse = InterpolateResponse

__all__ = [
    "ForwardBackwardReverseKLResponse", "InterpolateCheckpointsResponse", "ReverseKLDatum", "ReverseKLItemOutput",
    "forward_backward_reverse_kl", "forward_backward_reverse_kl_async", "interpolate_checkpoints",
    "interpolate_checkpoints_async",
]  # fmt: skip


def forward_backward_reverse_kl(
    training_client: TrainingClient,
    *,
    reference_model_path: str,
    data: Sequence[ReverseKlDatum],
    temperature: float = 1.0,
) -> ReverseKlResponse:
    """Move a run towards a reference, and wait; see `TrainingClient.forward_backward_reverse_kl`."""
    sent = training_client.forward_backward_reverse_kl(reference_model_path, data, temperature)
    return sent.result()


def forward_backward_reverse_kl_async(
    training_client: TrainingClient,
    *,
    reference_model_path: str,
    data: Sequence[ReverseKlDatum],
    temperature: float = 1.0,
) -> Submitted[ReverseKlResponse]:
    """Send the request. Awaiting it returns the future once the server has accepted it."""
    return training_client.forward_backward_reverse_kl_async(reference_model_path, data, temperature)


def interpolate_checkpoints(
    service_client: ServiceClient,
    *,
    source_paths: Sequence[str],
    coefficients: Sequence[float],
    output_path: str | None = None,
) -> InterpolateResponse:
    """Combine weights of checkpoints, and wait; see `ServiceClient.interpolate_checkpoints`."""
    return service_client.interpolate_checkpoints(source_paths, coefficients, output_path).result()


def interpolate_checkpoints_async(
    service_client: ServiceClient,
    *,
    source_paths: Sequence[str],
    coefficients: Sequence[float],
    output_path: str | None = None,
) -> Submitted[InterpolateResponse]:
    """Send the request. Awaiting it returns the future once the server has accepted it."""
    return service_client.interpolate_checkpoints_async(source_paths, coefficients, output_path)
