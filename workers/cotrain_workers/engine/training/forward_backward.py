"""Execution of the passes of a cycle, in as few base-model forwards as memory allows."""

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, count, zip_longest
from weakref import WeakSet

from cotrain_workers.engine.coordination import Yielding
from cotrain_workers.engine.device import is_out_of_memory, release_memory
from cotrain_workers.engine.lora.backend import LoraBackend
from cotrain_workers.engine.model.activation_checkpointing import RecomputePolicy
from cotrain_workers.engine.model.base_model import BaseModel
from cotrain_workers.engine.model.unembedding import NewSoftmax, PlainSoftmax
from cotrain_workers.engine.ops import ReverseKl, UpcomingBatch
from cotrain_workers.engine.training.batch_runner import BatchRunner
from cotrain_workers.engine.training.long_slices import MAX_SUSPENDED, RECENT_S, LongSlice
from cotrain_workers.engine.training.micro_batches import (
    BatchLimits,
    Budget,
    Fail,
    MicroBatch,
    OpSlice,
    PassesCost,
    Recompute,
    SaveMemory,
    Split,
    after_oom,
    fill,
    of_one_kind,
)
from cotrain_workers.engine.training.pass_outputs import memory_failure
from cotrain_workers.engine.training.pass_state import (
    PassState,
    collect,
    set_outputs,
    upcoming_batch,
)


class ForwardBackward:
    """Executor of passes over one base model. It handles micro-batches and sums, not cycles or optimizers."""

    def __init__(
        self,
        base: BaseModel,
        lora: LoraBackend,
        *,
        micro_batch_tokens: int,
        head_chunk_rows: int,
        recompute: RecomputePolicy = "auto",
        keep_tokens: int = sys.maxsize,
        save_tokens: int = sys.maxsize,
        new_softmax: NewSoftmax = PlainSoftmax,
    ) -> None:
        """Under "auto", micro-batches of more than `keep_tokens` recompute their decoder layers.

        A long datum of more than `save_tokens` has its layer inputs on the host, and its MLPs in chunks of rows.
        """
        self._base = base
        self._device = base.head_weight.device
        self.head_chunk_rows = head_chunk_rows
        self._micro_batch_tokens = micro_batch_tokens
        # The kernel of packed attention on CUDA takes queries and keys of one table, and a sequence of a hybrid
        # cannot begin with the state after its prompt.
        self._shares_prompts = self._device.type == "cpu" and not base.states
        self._long: WeakSet[LongSlice] = WeakSet()  # those that are, or may be, suspended
        self._may_recompute = recompute != "never"
        keep_tokens = {"always": 0, "auto": keep_tokens, "never": sys.maxsize}[recompute]
        save_tokens = max(save_tokens, micro_batch_tokens)
        self.limits = BatchLimits(Budget(micro_batch_tokens, keep_tokens, save_tokens=save_tokens))
        self._runner = BatchRunner(
            base,
            lora,
            self.limits,
            micro_batch_tokens=micro_batch_tokens,
            head_chunk_rows=head_chunk_rows,
            new_softmax=new_softmax,
        )
        self.watch: Callable[[UpcomingBatch], AbstractContextManager[None]] = lambda _: nullcontext()
        """The context of each micro-batch: the kernel may kill this process during one."""

    def run(
        self, passes: Sequence[PassState], cost: PassesCost, is_over: Callable[[], bool] = lambda: False
    ) -> Yielding[None]:
        """Run passes and set the output of each complete one; yield after each micro-batch.

        Passes of one run are in their order. Passes with an allowance run after the others. They stay open once it is
        used up, or once `is_over` returns True. Even then one micro-batch runs, of the pass that has waited longest.
        Then follow the first slices of the others, then more of each.
        """
        for at, state in enumerate(passes):
            state.set_slices(at, self._micro_batch_tokens, shares=self._shares_prompts)
        whole = [state.slices for state in passes if state.allowance is None]
        yield from self._run_slices([*chain.from_iterable(whole)], passes, cost)
        divided = [state for state in passes if state.allowance is not None and state.slices]
        if divided:
            yield from self._run_divided(divided, passes, cost, is_over)
        set_outputs(passes)
        if passes:
            self.limits.end_wave()

    @property
    def safe_tokens(self) -> int:
        """Tokens of a micro-batch that should fit; fewer for a while after memory ran out."""
        return self.limits.tokens

    def _run_divided(
        self, divided: list[PassState], passes: Sequence[PassState], cost: PassesCost, is_over: Callable[[], bool]
    ) -> Yielding[None]:
        divided.sort(key=lambda state: state.waits_since)
        calls = count()

        def stops() -> bool:
            """Return False the first time, so that each cycle advances some pass; then `is_over()`."""
            return next(calls) > 0 and is_over()

        for of_kind in of_one_kind([state.slices[0] for state in divided]):
            yield from self._run_slices(of_kind, passes, cost, stops)
        by_rank = zip_longest(*(state.allowed() for state in divided))
        more = [each for each in chain.from_iterable(by_rank) if each]
        yield from self._run_slices(more, passes, cost, stops)

    def _run_slices(
        self,
        op_slices: Sequence[OpSlice],
        passes: Sequence[PassState],
        cost: PassesCost,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Yielding[None]:
        """Run slices, those of one pass in their order; stop between two micro-batches once `is_over` returns True."""
        waiting = deque(fill(op_slices, self.limits.tokens))
        while waiting:
            if self._must_wait(waiting[0], passes):
                _drop(waiting, waiting[0].op_slices[0].owner)
                continue
            if is_over():
                return
            unusable = yield from self._runner.images.compute(waiting[0], passes)
            if unusable is not None:
                _drop(waiting, unusable)
                continue
            batch = waiting.popleft()
            if self._is_long(batch, passes):
                yield from self._run_long(batch, passes, waiting, cost, is_over)
                continue
            ran = self._try(batch, passes)
            if ran is None:
                cost.forwards += 1
                self._requeue(batch, passes, waiting, cost)
            for each in ran or ():
                cost.forwards += 1
                cost.tokens += each.tokens
                cost.padded_tokens += each.padded_tokens
            yield

    def _is_long(self, batch: MicroBatch, passes: Sequence[PassState]) -> bool:
        """Return True for one datum longer than a micro-batch, which would block all other work."""
        if len(batch.op_slices) > 1 or self._base.lock_step.sharding:
            return False
        op = passes[batch.op_slices[0].owner].op
        return batch.tokens > self._micro_batch_tokens and not isinstance(op, ReverseKl)

    def _must_wait(self, batch: MicroBatch, passes: Sequence[PassState]) -> bool:
        """Return True for a long datum that would block all work, because it cannot be suspended.

        At most MAX_SUSPENDED data are suspended at once. If none of those has run for RECENT_S, for instance because
        their tenants are paused, the datum runs to its end.
        """
        owner = passes[batch.op_slices[0].owner]
        if owner.allowance is None or owner.long or not self._is_long(batch, passes):
            return False
        recent = time.monotonic() - RECENT_S
        return len(self._long) >= MAX_SUSPENDED and any(each.ran_at > recent for each in self._long)

    def _run_long(
        self,
        batch: MicroBatch,
        passes: Sequence[PassState],
        waiting: deque[MicroBatch],
        cost: PassesCost,
        is_over: Callable[[], bool],
    ) -> Yielding[None]:
        """Run a long datum, or continue with it; suspend it after a layer once `is_over` returns True."""
        owner = passes[batch.op_slices[0].owner]
        # On CUDA layers take milliseconds, and kept inputs would not be in the memory model.
        may_suspend = owner.allowance is not None and self._device.type == "cpu"
        cost.forwards += 1
        long = owner.long
        try:
            if long is None:
                may_suspend &= len(self._long) < MAX_SUSPENDED
                long = owner.long = self._runner.start_long(batch, passes)
                if may_suspend:
                    self._long.add(long.slice)
            else:
                long.slice.route, _ = self._runner.route(batch, passes)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            long = None
        while long is not None:
            try:
                with self.watch(upcoming_batch(batch, passes)):
                    next(long.work)
            except StopIteration as end:
                owner.long = None
                self._long.discard(long.slice)
                cost.padded_tokens += batch.padded_tokens - batch.tokens
                _count(owner, batch.tokens, cost)
                owner.long_counted = 0
                collect(batch, passes, {batch.op_slices[0]: end.value})
                return
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                break
            _count(owner, long.slice.done_tokens, cost)
            if may_suspend and long.slice.may_stop and is_over():
                long.slice.suspend()
                return
            yield
        # Memory ran out. Here the exception is released, and with it the tensors that its frames held.
        del long
        if owner.long is not None:
            self._long.discard(owner.long.slice)
        owner.undo_long()
        release_memory(self._device)
        self._requeue(batch, passes, waiting, cost)
        yield

    def _try(self, batch: MicroBatch, passes: Sequence[PassState]) -> list[MicroBatch] | None:
        """Run a micro-batch and return it, after the micro-batches of its references.

        If memory runs out, undo it and return None.
        """
        owners = [passes[at] for at in dict.fromkeys(op_slice.owner for op_slice in batch.op_slices)]
        of_earlier_slices = None
        try:
            of_earlier_slices = [(p.gradient, p.gradient.flat.clone()) for p in owners if p.gradient]
            with self.watch(upcoming_batch(batch, passes)):
                return self._runner.run(batch, passes)
        except (RuntimeError, MemoryError) as error:
            # The other processes of this base model are in the middle of the same pass.
            if not is_out_of_memory(error) or self._base.lock_step.sharding:
                raise
        # Here the exception is released, and with it the tensors that its frames held.
        if of_earlier_slices is not None:  # otherwise nothing has run
            for owner in owners:
                if owner.gradient is not None:
                    owner.gradient.discard()
            for gradient, before in of_earlier_slices:
                gradient.flat.copy_(before)
        release_memory(self._device)
        return None

    def _requeue(
        self, batch: MicroBatch, passes: Sequence[PassState], waiting: deque[MicroBatch], cost: PassesCost
    ) -> None:
        """Put the parts of a batch that ran out of memory at the front of the queue."""
        op_slice = batch.op_slices[0]
        owner = passes[op_slice.owner]
        lengths = [len(datum.tokens) for datum in owner.op.datums[op_slice.first : op_slice.last]]
        can_recompute = self._may_recompute and not self.limits.recomputes(batch.padded_tokens)
        can_save = self._is_long(batch, passes) and not self.limits.saves_memory(batch.tokens)
        can_save &= self._may_recompute or not op_slice.needs_grad
        match after_oom(batch, lengths, owner.shared_in(op_slice), can_recompute=can_recompute, can_save=can_save):
            case SaveMemory():
                self.limits.save_tokens = batch.tokens - 1
                owner.is_exact = False
                waiting.appendleft(batch)
            case Recompute():
                self.limits.lower(keep_tokens=batch.padded_tokens - 1)
                waiting.appendleft(batch)
            case Fail(tokens):
                owner.fail(memory_failure(tokens))
                _drop(waiting, op_slice.owner)
            case Split(first, second, cuts_slice):
                if cuts_slice:
                    owner.slices.popleft()
                    owner.slices.extendleft((*second.op_slices, *first.op_slices))
                    owner.is_exact = False
                cost.cut_slices += cuts_slice
                cost.halvings += 1
                self.limits.lower(tokens=max(first.tokens, second.tokens))
                waiting.extendleft((second, first))

    def spare_memory(self, tokens: int) -> None:
        """Use less memory for micro-batches of this size until the process ends.

        Fewer slices run together, and layers are recomputed. No bit depends on either.
        """
        keep_tokens = tokens - 1 if self._may_recompute else sys.maxsize
        self.limits.lower_plan(tokens=max(1, tokens // 2), keep_tokens=keep_tokens)


def _count(owner: PassState, done_tokens: int, cost: PassesCost) -> None:
    """Add the progress of a long datum to the cost. What ran before memory ran out counts once."""
    more = max(0, done_tokens - owner.long_counted)
    owner.long_counted += more
    cost.tokens += more
    cost.padded_tokens += more


def _drop(waiting: deque[MicroBatch], owner: int) -> None:
    """Remove the slices of one pass from the micro-batches that wait."""
    left = [batch.without(owner) for batch in waiting]
    waiting.clear()
    waiting.extend(batch for batch in left if batch.op_slices)
