"""State of an op while its slices run: its results so far, and its gradient."""

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import torch

from cotrain_workers.engine.adapters.adapter import Adapter, Gradient, Steepest, is_all_finite
from cotrain_workers.engine.coordination import Yielding
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
from cotrain_workers.engine.training.custom_loss import broken_datum, custom_metrics
from cotrain_workers.engine.training.drift import drift, lag
from cotrain_workers.engine.training.heads import HeadResult
from cotrain_workers.engine.training.long_slices import LongSlice
from cotrain_workers.engine.training.losses import inputs_of, loss_of, steepest_target
from cotrain_workers.engine.training.micro_batches import MicroBatch, OpSlice, Span, cut, shared_prompts, spans_of

#: Limit of an exponent: exp of more is infinite in float32, or leaves a gradient no range.
FAR_APART = 80.0
#: Loss above which the steepest target of a pass is recorded, in case its gradient is too large for a step.
STEEP_LOSS = 1e9
#: Weights above this explain a loss that is not finite better than the data.
LARGE_WEIGHT = 1e6
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
    long: LongSlice | None = None  # first of `slices`, if a part of it has run: a datum longer than a micro-batch
    long_work: Yielding[HeadResult] | None = None  # remaining computation of `long`
    long_counted: int = 0  # tokens of `long` that are in the cost of this or an earlier cycle
    gradient: Gradient | None = None  # destination of its weight gradients, once a slice has run
    gradient_before: torch.Tensor | None = None  # copy from before `long`, if other slices have run before it
    results: list[HeadResult] = field(default_factory=list)  # of its slices, on the device
    is_exact: bool = True  # False: a slice was cut, which moves the last bits of the sums
    is_finite: torch.Tensor | None = None  # all of it, and its gradient; set by `close`
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
        return self.rows + (self.long.done_tokens if self.long else 0)

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

    def cut(self, at: int, limit: int, *, shares: bool) -> None:
        """Cut the pass, with index `at` among the running ones, into slices of at most `limit` rows.

        With `shares`, neighbouring datums share the rows of a common prompt.
        """
        if self.rows or self.long:  # the rest of an open pass was cut when it started
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
        self.slices = deque(cut(at, lengths, columns, limit, needs_grad=self.op.needs_grad, shared=self.shared))
        if not self.slices:
            self.output = output_of(self.op, [], 0.0, 0)

    def undo_long(self) -> None:
        """Drop a long datum that ran out of memory, and its share of the gradient."""
        self.long = self.long_work = None
        before, self.gradient_before = self.gradient_before, None
        # Without the copy of earlier slices' sums, nothing has been added to them.
        if self.gradient is not None and (before is not None or not self.results):
            self.gradient.discard()
            if before is not None:
                self.gradient.flat.copy_(before)


def collect(batch: MicroBatch, passes: Sequence[PassState], result_by_slice: Mapping[OpSlice, HeadResult]) -> None:
    """Store the result of each slice, and close the complete passes."""
    for op_slice in batch.op_slices:
        state = passes[op_slice.owner]
        ran = state.slices.popleft()
        assert ran == op_slice, "the slices of a pass run in their order"
        state.rows += state.rows_of(ran)
        state.results.append(result_by_slice[op_slice])
    for at in dict.fromkeys(op_slice.owner for op_slice in batch.op_slices):
        if not passes[at].slices:
            close(passes[at])


def close(done: PassState) -> None:
    """Keep the gradient of a complete pass if all of its results are finite; otherwise discard it.

    The device decides, and the host does not wait for it: it reads the verdict in `finish`.
    """
    verdicts = [torch.isfinite(total_loss(done))]
    verdicts += [is_all_finite(result.found) for result in done.results]
    if done.gradient is not None:
        verdicts.append(done.adapter.is_finite(done.gradient))
    done.is_finite = torch.stack(verdicts).all()
    if done.gradient is not None:
        done.adapter.add(done.gradient, done.is_finite)
        if done.gradient is not done.adapter.gradient:
            done.gradient = None


def finish(passes: Sequence[PassState]) -> None:
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
        [torch.stack([total_loss(done), done.is_finite.double()])]
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


def total_loss(done: PassState) -> torch.Tensor:
    """Return the loss of all slices, a float64 scalar on the device, added in the order of slices."""
    total = done.results[0].loss
    for result in done.results[1:]:
        total = total + result.loss
    return total


def give_up(failed: PassState, failure: Failure) -> None:
    """Fail an incomplete pass and undo it."""
    if failed.gradient is not None:
        failed.adapter.take_back(failed.gradient)
        failed.gradient = None
    failed.long = failed.long_work = None
    failed.slices.clear()
    failed.results.clear()
    failed.output = failure


def output_of(
    op: Pass | ReverseKl, found: Sequence[np.ndarray], loss_sum: float, rows: int
) -> PassOutput | ReverseKlOutput:
    """Return the output of a complete pass of `rows` rows; `found` are log-probabilities or divergences, per datum."""
    if not isinstance(op, ReverseKl):
        metrics = drift(op, found) if op.graph is None else custom_metrics(op.graph, op.datums, found)
        tokens = sum(len(datum.tokens) for datum in op.datums)
        return PassOutput(found, loss_sum, {**metrics, **lag(op)}, tokens - rows)
    weights = [datum.weights for datum in op.datums]
    return ReverseKlOutput(
        losses=[w * kl for w, kl in zip(weights, found, strict=True)],
        loss_sum=loss_sum,
        kl_sum=float(sum(kl.sum(dtype=np.float64) for kl in found)),
        weighted_tokens=sum(int(np.count_nonzero(w)) for w in weights),
    )


def memory_failure(tokens: int) -> Failure:
    """Return the failure of a pass with a datum of `tokens` tokens that does not fit into memory."""
    return Failure(f"Request needs more memory than the worker has ({tokens} tokens).", "server")


def record_steepest(adapter: Adapter, op: Pass, found: Sequence[np.ndarray]) -> None:
    """Store the steepest target of a pass with the adapter, unless an earlier pass has a steeper one."""
    for number, (datum, now) in enumerate(zip(op.datums, found, strict=True)):
        loss = loss_of(op, [datum])
        config = {**loss.defaults, **op.loss_config}
        inputs = {name: torch.from_numpy(datum.inputs[name]) for name in inputs_of(op, loss)}
        slope, at = steepest_target(loss, torch.from_numpy(now), inputs, config)
        if adapter.steepest is None or slope > adapter.steepest.slope:
            index = ", ".join(str(axis) for axis in np.unravel_index(at, now.shape))
            recorded = datum.inputs["logprobs"].flat[at] if "logprobs" in loss.inputs else None
            adapter.steepest = Steepest(op.seq, number, index, slope, float(now.flat[at]), recorded)


def not_finite(op: Pass | ReverseKl, found: Sequence[np.ndarray], adapter: Adapter) -> Failure:
    """Return the failure of a pass whose loss, log-probabilities or gradient are not finite."""
    discarded = "; the gradient was discarded" if op.needs_grad else ""
    why = broken_weights(adapter)
    if not why and isinstance(op, Pass):
        if op.graph is None:
            why = too_far_apart(op, found)
        else:
            why = broken_datum(op.graph, op.datums, found, needs_grad=op.needs_grad)
    return Failure(f"Loss is not finite (seq {op.seq}){discarded}.{why}", "user", "not_finite")


def broken_weights(adapter: Adapter) -> str:
    """Return a sentence on weights that are not finite or far too large, with the remedy; "" for others."""
    low, high = adapter.weights.aminmax()
    largest = max(-float(low), float(high))
    if largest <= LARGE_WEIGHT:
        return ""
    state = f"reach {largest:.3g}" if math.isfinite(largest) else "are not finite"
    return (
        f" The run's own weights {state}, so every pass fails: load an earlier checkpoint (load_state), or make"
        " a new run, and step with a smaller learning_rate."
    )


def too_far_apart(op: Pass, found: Sequence[np.ndarray]) -> str:
    """Return a sentence on the first target whose ratio exceeds float32, with the remedy; "" if there is none."""
    signs = loss_of(op, op.datums).unbounded_for
    for number, (datum, now) in enumerate(zip(op.datums, found, strict=True)):
        if not signs:
            break
        then, advantages = datum.inputs["logprobs"], datum.inputs["advantages"]
        (far,) = np.nonzero(np.isin(np.sign(advantages), signs) & (now - then > FAR_APART))
        if len(far):
            target = int(far[0])
            return (
                f" data[{number}].loss_fn_inputs.logprobs[{target}] is {then[target]:.6g}, and the target's"
                f" log-probability is {now[target]:.6g} now: {op.loss_fn} multiplies by exp of the"
                " difference, which float32 cannot hold. Set that token's advantage to 0, or use cispo,"
                " which bounds the ratio."
            )
    return ""


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
