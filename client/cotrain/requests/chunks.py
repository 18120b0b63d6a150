"""Chunks of a pass, and the combination of their results.

A cotrain server receives a pass in one request, so that it adds the whole gradient or nothing. Other servers of
the protocol publish a request size limit, and each request succeeds or fails separately.
"""

from collections.abc import Callable, Sequence

from cotrain.errors import UnsupportedInput
from cotrain.wire.datums import ForwardBackwardOutput
from cotrain.wire.proto import wire_pb2 as wire
from cotrain.wire.sessions import ClientConfigResponse

_MIB = 1024**2
_HEAD_BYTES = 4096
_FRAME_BYTES = 6
"""Upper bounds of the overhead in bytes: per request, and per datum."""


def chunks_of(datums: Sequence[wire.Datum], config: ClientConfigResponse) -> list[Sequence[wire.Datum]]:
    """Split a pass into the chunks that its server requires; a cotrain server receives it whole.

    Raises UnsupportedInput if it exceeds the limits of a cotrain server for one request.
    """
    max_bytes = config.cotrain_max_pass_bytes
    if max_bytes is None:
        return [*cut(datums, config.fwdbwd_max_chunk_len, config.fwdbwd_max_chunk_bytes_count)]
    if len(datums) > config.fwdbwd_max_chunk_len:
        raise UnsupportedInput(
            f"data has {len(datums)} datums; one call takes up to {config.fwdbwd_max_chunk_len} here, "
            "because it adds all of its gradient or nothing. Send it in several calls: their "
            "gradients add up"
        )
    size = _HEAD_BYTES + sum(datum.ByteSize() + _FRAME_BYTES for datum in datums)
    if size > max_bytes:
        raise UnsupportedInput(
            f"data has {size / _MIB:.1f} MiB; one call takes up to {max_bytes / _MIB:.1f} MiB here "
            "(COTRAIN_MAX_BODY_BYTES of the server), because it adds all of its gradient or "
            "nothing. Send it in several calls: their gradients add up"
        )
    return [datums]


def cut(datums: Sequence[wire.Datum], max_datums: int, max_bytes: int) -> list[list[wire.Datum]]:
    """Split datums, in order, into the fewest chunks within both limits; an empty list gives one chunk.

    A single datum over the limit gets its own chunk.
    """
    chunks: list[list[wire.Datum]] = [[]]
    chunk_bytes = 0
    for datum in datums:
        size = datum.ByteSize()
        is_full = len(chunks[-1]) == max_datums or chunk_bytes + size > max_bytes
        if chunks[-1] and is_full:
            chunks.append([])
            chunk_bytes = 0
        chunks[-1].append(datum)
        chunk_bytes += size
    return chunks


def combine(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """Combine the results of a pass's chunks, in order, into the result of the whole pass.

    The suffix of a metric's name selects the reduction:

    * `:sum`, `:min`, `:max`, and `:mean` weighted by number of datums;
    * `:slack`, the maximum less that mean;
    * `:unique`, every value, as `name`, `name_1`, ….

    Metrics with another suffix, or missing in a chunk, are left out.
    """
    first, *others = outputs
    if not others:
        return first
    metrics: dict[str, float] = {}
    for name in first.metrics:
        if all(name in output.metrics for output in others):
            metrics.update(_combine_metric(name, outputs))
    return ForwardBackwardOutput(
        loss_fn_output_type=first.loss_fn_output_type,
        loss_fn_outputs=[datum for output in outputs for datum in output.loss_fn_outputs],
        metrics=metrics,
    )


def _combine_metric(name: str, outputs: Sequence[ForwardBackwardOutput]) -> dict[str, float]:
    values = [output.metrics[name] for output in outputs]
    weights = [len(output.loss_fn_outputs) for output in outputs]
    kind = name.rpartition(":")[2]
    if kind == "unique":
        return {f"{name}_{number}" if number else name: value for number, value in enumerate(values)}
    if kind not in _REDUCERS:
        return {}
    return {name: _REDUCERS[kind](values, weights)}


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    total = sum(weights)
    if not total:  # no chunk has datums, so there are no weights
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total


_REDUCERS: dict[str, Callable[[Sequence[float], Sequence[int]], float]] = {
    "sum": lambda values, _: sum(values),
    "min": lambda values, _: min(values),
    "max": lambda values, _: max(values),
    "mean": _mean,
    "slack": lambda values, weights: max(values) - _mean(values, weights),
}
