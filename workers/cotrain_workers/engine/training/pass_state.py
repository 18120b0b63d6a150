"""State of an op while its slices run: its results so far, and its gradient."""

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import torch

from cotrain_workers.engine.adapters.adapter import Adapter, Gradient, is_all_finite
from cotrain_workers.engine.ops import (
    Datum,
    Failure,
    KlDatum,
    OpId,
    Pass,
    PassOutput,
    ReverseKl,
    ReverseKlOutput,
    UpcomingBatch,
)
from cotrain_workers.engine.training.heads import HeadResult
from cotrain_workers.engine.training.long_slices import StartedLong
from cotrain_workers.engine.training.micro_batches import MicroBatch, OpSlice, Span, cut_op, shared_prompts, spans_of
from cotrain_workers.engine.training.pass_outputs import not_finite, output_of, record_steepest

#: Loss above which the steepest target of a pass is recorded, in case its gradient is too large for a step.
STEEP_LOSS = 1e9
_TIMES = count()


@dataclass
class PassState:
    """A pass in progress."""

    op: Pass | ReverseKl
    adapter: Adapter
    allowance: int | None = None  # tokens that may run in this cycle before the pass stays open; None: all run
    waits_since: int = field(default_factory=lambda: next(_TIMES))
    """Order by start or last execution, for passes that may stay open; the lowest waited longest."""
    slices: deque[OpSlice] = field(default_factory=deque)  # pending, in order
    shapes: Sequence[tuple[int, ...]] = ()  # of the results
    shared: Sequence[int] = ()  # first tokens of each datum that equal those of the first datum of its group
    rows: int = 0  # tokens of the slices that have run
    rows_before: int = 0  # `done_rows` at the start of this cycle
    long: StartedLong | None = None  # first of `slices`, if a part of it has run: a datum longer than a micro-batch
    long_counted: int = 0  # tokens of `long` that are in the cost of this or an earlier cycle
    gradient: Gradient | None = None  # destination of its weight gradients, once a slice has run
    results: list[HeadResult] = field(default_factory=list)  # of its slices, on the device
    is_exact: bool = True  # False: a slice was cut, which moves the last bits of the sums
    is_finite: torch.Tensor | None = None  # all of it, and its gradient; set by `close_gradient`
    output: PassOutput | ReverseKlOutput | Failure | None = None

    def rows_of(self, op_slice: OpSlice) -> int:
        """Return the number of tokens that the base model reads for one of this pass's slices,
        including the reference's.
        """
        if not isinstance(self.op, ReverseKl):
            return op_slice.tokens
        datums = self.op.datums[op_slice.first : op_slice.last]
        return op_slice.tokens + sum(len(datum.reference) for datum in datums)

    def resume(self, allowance: int | None) -> None:
        """Continue in another cycle."""
        if self.rows_now:
            self.waits_since = next(_TIMES)
        self.allowance, self.rows_before = allowance, self.done_rows
        if self.done_rows and self.op.needs_grad:
            self.gradient = self.adapter.open_gradient

    def allowed(self) -> Iterator[OpSlice]:
        """Yield the slices after the first that fit into the allowance."""
        left = (self.allowance or 0) - self.rows_now
        for op_slice in self.slices:
            left -= self.rows_of(op_slice)
            if left < 0:
                return
            yield op_slice

    @property
    def done_rows(self) -> int:
        """Number of tokens that have run, including the finished part of a long datum."""
        return self.rows + (self.long.slice.done_tokens if self.long else 0)

    @property
    def rows_now(self) -> int:
        """Number of tokens that have run in this cycle; 0 if a long datum of earlier cycles begins anew."""
        return max(0, self.done_rows - self.rows_before)

    def shared_in(self, op_slice: OpSlice) -> Sequence[int]:
        """Return the tokens of each datum whose rows belong to an earlier datum of the same slice."""
        return [0, *self.shared[op_slice.first + 1 : op_slice.last]]

    def given_experts(self, op_slice: OpSlice, start: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the first row of each datum of a slice at row `start`, and the experts `[n, layers, k]` that it gives."""
        datums: Sequence[Datum | KlDatum] = self.op.datums[op_slice.first : op_slice.last]
        for datum, shared in zip(datums, self.shared_in(op_slice), strict=True):
            if datum.routed_experts is not None:
                yield start, datum.routed_experts[shared:]
            start += len(datum.tokens) - shared

    def spans(self, op_slice: OpSlice, start: int) -> list[Span]:
        """Return the rows of each datum of a slice from row `start` on; [] if no datums share a prompt."""
        shared = self.shared_in(op_slice)
        datums = self.op.datums[op_slice.first : op_slice.last]
        return spans_of(start, [len(datum.tokens) for datum in datums], shared) if any(shared) else []

    def set_slices(self, at: int, limit: int, *, shares: bool) -> None:
        """Cut the pass, with index `at` among the running ones, into slices of at most `limit` rows.

        The rest of an open pass keeps the cuts of its start. With `shares`, neighbouring datums share the rows of a
        common prompt.
        """
        if self.rows or self.long:
            self.slices = deque(replace(each, owner=at) for each in self.slices)
            return
        self.shapes = [datum.shape for datum in self.op.datums]
        lengths = [len(datum.tokens) for datum in self.op.datums]
        columns = [math.prod(shape[1:]) for shape in self.shapes]
        if self.op.slice_tokens is not None and self.op.slice_tokens < limit:
            limit, self.is_exact = self.op.slice_tokens, False
        self.shared = [0] * len(lengths)
        if shares and isinstance(self.op, Pass):
            self.shared = shared_prompts(self.op.datums)
        self.slices = deque(cut_op(at, lengths, columns, limit, needs_grad=self.op.needs_grad, shared=self.shared))
        if not self.slices:
            self.output = output_of(self.op, [], 0.0, 0)

    def undo_long(self) -> None:
        """Drop a long datum that ran out of memory, and its share of the gradient."""
        before = self.long.gradient_before if self.long else None
        self.long = None
        # Without the copy of earlier slices' sums, nothing has been added to them.
        if self.gradient is not None and (before is not None or not self.results):
            self.gradient.discard()
            if before is not None:
                self.gradient.flat.copy_(before)

    def close_gradient(self) -> None:
        """Keep the gradient of the complete pass if all of its results are finite; otherwise discard it.

        The device decides, and the host does not wait for it: it reads the verdict in `set_outputs`.
        """
        verdicts = [torch.isfinite(self.total_loss())]
        verdicts += [is_all_finite(result.found) for result in self.results]
        if self.gradient is not None:
            verdicts.append(self.adapter.is_finite(self.gradient))
        self.is_finite = torch.stack(verdicts).all()
        if self.gradient is not None:
            self.adapter.add(self.gradient, self.is_finite)
            if self.gradient is not self.adapter.gradient:
                self.gradient = None

    def total_loss(self) -> torch.Tensor:
        """Return the loss of all slices, a float64 scalar on the device, added in the order of slices."""
        total = self.results[0].loss
        for result in self.results[1:]:
            total = total + result.loss
        return total

    def fail(self, failure: Failure) -> None:
        """Fail the incomplete pass and undo it."""
        if self.gradient is not None:
            self.adapter.take_back(self.gradient)
            self.gradient = None
        self.long = None
        self.slices.clear()
        self.results.clear()
        self.output = failure


def collect(batch: MicroBatch, passes: Sequence[PassState], result_by_slice: Mapping[OpSlice, HeadResult]) -> None:
    """Store the result of each slice, and close the gradients of complete passes."""
    for op_slice in batch.op_slices:
        state = passes[op_slice.owner]
        ran = state.slices.popleft()
        assert ran == op_slice, "the slices of a pass run in their order"
        state.rows += state.rows_of(ran)
        state.results.append(result_by_slice[op_slice])
    for at in dict.fromkeys(op_slice.owner for op_slice in batch.op_slices):
        if not passes[at].slices:
            passes[at].close_gradient()


def set_outputs(passes: Sequence[PassState]) -> None:
    """Set the outputs of complete passes without one. Waits for the device, once."""
    left = [each for each in passes if each.output is None and not each.slices]
    for done, values in zip(left, values_on_host(left), strict=True):
        loss_sum, is_finite = float(values[0]), bool(values[1])
        done.adapter.gradient_in_use = False
        found = per_datum(done, values[2:].astype(np.float32))
        if is_finite and done.op.needs_grad and done.results:
            done.adapter.grads_pending = True
            if isinstance(done.op, Pass) and abs(loss_sum) > STEEP_LOSS:
                record_steepest(done.adapter, done.op, found)
        done.output = (
            output_of(done.op, found, loss_sum, done.rows) if is_finite else not_finite(done.op, found, done.adapter)
        )


def values_on_host(passes: Sequence[PassState]) -> list[np.ndarray]:
    """Return the loss of each pass, 1 if all is finite, then all results; float64, in one copy."""
    if not passes:
        return []
    parts = [
        [torch.stack([done.total_loss(), done.is_finite.double()])]
        + [result.found.flatten().float().double() for result in done.results]
        for done in passes
        if done.is_finite is not None
    ]
    on_host = torch.cat([part for of_pass in parts for part in of_pass]).cpu().numpy()
    sizes = [sum(len(part) for part in of_pass) for of_pass in parts]
    return np.split(on_host, np.cumsum(sizes)[:-1])


def per_datum(done: PassState, found: np.ndarray) -> list[np.ndarray]:
    """Split the results of a pass, one value per target, into its datums."""
    values = np.split(found, np.cumsum([math.prod(shape) for shape in done.shapes])[:-1])
    return [each.reshape(shape) for each, shape in zip(values, done.shapes, strict=True)]


def upcoming_batch(batch: MicroBatch, passes: Sequence[PassState]) -> UpcomingBatch:
    """Return the size of a micro-batch that runs next."""
    largest = passes[max(batch.op_slices, key=lambda op_slice: op_slice.tokens).owner].op
    lengths = (
        len(datum.tokens)
        for op_slice in batch.op_slices
        for datum in passes[op_slice.owner].op.datums[op_slice.first : op_slice.last]
    )
    return UpcomingBatch(largest.id, batch.tokens, max(lengths), batch.needs_grad)


class OpenPasses:
    """Passes that take several cycles, between two of them; at most one of each run.

    They are not part of a run's state. An adapter that is dropped or restored drops its open pass, which then starts
    anew and produces the same bits.
    """

    def __init__(self) -> None:
        self._state_by_run: dict[str, PassState] = {}

    def __contains__(self, op_id: object) -> bool:
        return op_id in self.ids

    @property
    def ids(self) -> frozenset[OpId]:
        """Open passes, by (run, seq)."""
        return frozenset((run, state.op.seq) for run, state in list(self._state_by_run.items()))

    @property
    def runs(self) -> Collection[str]:
        """Runs with an open pass."""
        return self._state_by_run.keys()

    def drop(self, run: str) -> None:
        """Drop the open pass of a run, if any."""
        state = self._state_by_run.pop(run, None)
        if state is not None:
            state.adapter.drop_open_gradient()

    def take(self, first_by_run: Mapping[str, int]) -> dict[OpId, PassState]:
        """Remove and return the open passes that come next in their runs, by (run, seq).

        Drop other open passes of these runs.
        """
        taken = {}
        for run, seq in first_by_run.items():
            state = self._state_by_run.get(run)
            if state is not None and state.op.seq == seq:
                taken[run, seq] = self._state_by_run.pop(run)
            else:
                self.drop(run)
        return taken

    def keep(self, state: PassState) -> None:
        """Keep an unfinished pass. Its gradient stays with its adapter and moves with it."""
        state.gradient = None
        self._state_by_run[state.op.run] = state
