"""Images of a micro-batch: results of the vision tower, and their places in the packed row."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from cotrain_workers.engine.coordination import Yielding
from cotrain_workers.engine.device import is_out_of_memory, release_memory
from cotrain_workers.engine.model.base_model import TokenRow
from cotrain_workers.engine.model.vision import ImageUnusable, Vision, image_rows, rotary_positions
from cotrain_workers.engine.ops import Datum, Failure, Pass
from cotrain_workers.engine.routing import ImageRows
from cotrain_workers.engine.training.micro_batches import MicroBatch, OpSlice, PassesCost
from cotrain_workers.engine.training.pass_state import PassState, give_up, needs_memory


class BatchImages:
    """Images of the micro-batch that runs next."""

    def __init__(self, vision: Vision | None, device: torch.device) -> None:
        self._vision = vision
        self._device = device
        self._features: dict[tuple[str, bytes], torch.Tensor] = {}  # by tenant and digest

    def compute(self, batch: MicroBatch, passes: Sequence[PassState], cost: PassesCost) -> Yielding[int | None]:
        """Run the tower for the images of a micro-batch; yield after each one that it computes.

        Return the owner of an image that cannot be computed, after failing its pass; None if there is none.
        """
        if self._vision is None:
            return None
        wanted = {
            (_scope(op), image.digest): (op_slice.owner, image)
            for op_slice, op, datums in _of_passes(batch, passes)
            for datum in datums
            for image in datum.images
        }
        self._features = {key: self._features[key] for key in wanted if key in self._features}
        for key, (owner, image) in wanted.items():
            if key in self._features:
                continue
            began, failure = time.perf_counter(), None
            try:
                self._features[key] = self._vision.features(key[0], image)
            except ImageUnusable as unusable:
                failure = Failure(str(unusable), "user")
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failure = needs_memory(image.tokens)
            cost.seconds += time.perf_counter() - began
            if failure is not None:
                release_memory(self._device)
                give_up(passes[owner], failure)
                return owner
            yield
        return None

    def insert(
        self, batch: MicroBatch, passes: Sequence[PassState], row: TokenRow
    ) -> tuple[TokenRow, ImageRows | None]:
        """Return the row with the positions of its images, and the images of its route."""
        if not self._features:
            return row, None
        placed: list[tuple[int, torch.Tensor]] = []
        positions = np.tile(row.positions, (3, 1))
        start_by_slice = {op_slice: start for op_slice, (start, _) in zip(batch.op_slices, batch.spans, strict=True)}
        for op_slice, op, datums in _of_passes(batch, passes):
            start = start_by_slice[op_slice]
            shared = passes[op_slice.owner].shared_in(op_slice)
            for datum, prompt in zip(datums, shared, strict=True):
                stop = start + len(datum.tokens) - prompt
                if datum.images:
                    positions[:, start:stop], _ = rotary_positions(stop - start, datum.images)
                placed += [(start + image.start, self._features[_scope(op), image.digest]) for image in datum.images]
                start = stop
        return replace(row, positions=positions), image_rows(placed, self._device)


def _scope(op: Pass) -> str:
    return op.tenant or op.run


def _of_passes(batch: MicroBatch, passes: Sequence[PassState]) -> Iterator[tuple[OpSlice, Pass, Sequence[Datum]]]:
    """Yield the slices that may have images, each with its pass and its datums."""
    for op_slice in batch.op_slices:
        op = passes[op_slice.owner].op
        if isinstance(op, Pass):
            yield op_slice, op, op.datums[op_slice.first : op_slice.last]
