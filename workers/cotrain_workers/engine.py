"""The training engine: one cycle's ops in, one answer per op out.

One wave of forward/backward over every pass of the cycle, whatever its adapter, rank, targets or loss;
then one wave of optimizer steps. A run's results depend on its own ops alone (on CPU fp32 to the bit).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cotrain_workers.adam import adamw_step, discard_gradient, gradient_norm, refuse_step
from cotrain_workers.adapter_ops import begin, begins_run, load, save, unknown_run
from cotrain_workers.admission import refuse_pass, refuse_reverse_kl
from cotrain_workers.bank import AdapterBank, AdapterState
from cotrain_workers.base_model import load_base_model
from cotrain_workers.decoder import EngineDecoder
from cotrain_workers.decoder_sizes import DecoderSizes
from cotrain_workers.device import check_device
from cotrain_workers.heap import keep_freed_memory
from cotrain_workers.numerics import numerics_of
from cotrain_workers.open_pass import OpenPass
from cotrain_workers.ops import (
    CycleOutput,
    Failure,
    Load,
    OptimStep,
    Output,
    Pass,
    ReverseKl,
    Save,
    StepOutput,
)
from cotrain_workers.wave import Wave

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cotrain_workers.base_model import BaseModel
    from cotrain_workers.numerics import Numerics
    from cotrain_workers.ops import Op
    from cotrain_workers.sample_ops import HostWeights, TextOf
    from cotrain_workers.spec import AdapterSpec, Family, Layout, Target


@dataclass(frozen=True)
class ModelFacts:
    """What the other processes may know about the base model and this engine."""

    model: str  # as given to `Engine.load`
    architecture: str
    vocab_size: int  # rows of the embedding, padded ones included
    context_length: int
    num_parameters: int
    max_rank: int
    eos_token_ids: tuple[int, ...]  # what ends a generation, ascending; may be empty
    modules_by_family: Mapping[Family, int]  # how many modules each train_* flag covers
    numerics: Numerics

    @property
    def numerics_id(self) -> str:
        """Equal ids: the same plan gives the same bits."""
        return self.numerics.id


class Engine:
    """One frozen base model and the adapters of all runs that train on it. Not thread-safe."""

    def __init__(self, facts: ModelFacts, base: BaseModel, wave: Wave, bank: AdapterBank) -> None:
        self.facts = facts
        # All since the engine was loaded:
        self.base_forwards = 0
        self.halvings = 0  # of what did not fit into memory
        self.cut_pieces = 0  # among that; an op so cut has other last bits than with more memory
        self._base = base
        self._wave = wave
        self._bank = bank

    @classmethod
    def load(
        cls,
        model: str,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        micro_batch_tokens: int = 8192,
        head_chunk_rows: int = 1024,
        local_files_only: bool = True,
    ) -> Engine:
        """Load a hub id or a folder; fp32 on CPU and bf16 on CUDA unless `dtype` says otherwise.

        Set the number of threads before: it is part of `facts.numerics_id`. For the whole process this
        turns on deterministic algorithms (CUDA) or keeps freed memory (CPU). Raises UnsupportedModel,
        or OSError if there is no such model.
        """
        place = torch.device(device)
        dtype = dtype or (torch.bfloat16 if place.type == "cuda" else torch.float32)
        if place.type == "cuda":
            make_cuda_deterministic()
        else:
            keep_freed_memory()
        base = load_base_model(model, device=place, dtype=dtype, local_files_only=local_files_only)
        sizes = (micro_batch_tokens, head_chunk_rows)
        wave = Wave(base, micro_batch_tokens=sizes[0], head_chunk_rows=sizes[1])
        bank = AdapterBank(base.targets, place, dtype)
        return cls(model_facts(model, base, numerics_of(place, dtype, sizes)), base, wave, bank)

    def run(self, ops: Sequence[Op], between: Callable[[], None] | None = None) -> CycleOutput:
        """Run one cycle: per run, ascending `seq`,
        `(Create | Import | Load)? (Pass | ReverseKl)* OptimStep? (Save | Load)*`.

        Every op gets an output; one that cannot run or yields NaN fails alone and leaves no trace.
        `between` is called after each micro-batch; a decoder of this engine may step in it.
        An exception means a broken engine: its adapters must then be restored from their last states.
        """
        outputs: dict[tuple[str, int], Output] = {}
        for op in ops:
            if begins_run(op):
                outputs[op.run, op.seq] = begin(self._bank, op, self.facts.max_rank)
        began = time.perf_counter()
        passes = self._admit([op for op in ops if isinstance(op, Pass | ReverseKl)], outputs)
        cost = self._wave.run(passes, between)
        for done in passes:
            assert done.output is not None
            outputs[done.op.run, done.op.seq] = done.output
        middle = time.perf_counter()
        for op in ops:
            if isinstance(op, OptimStep):
                outputs[op.run, op.seq] = self._step(op)
        for op in ops:
            if isinstance(op, Save):
                outputs[op.run, op.seq] = save(self._bank, op)
            elif isinstance(op, Load) and not op.creates:
                outputs[op.run, op.seq] = load(self._bank, op)
        self.base_forwards += cost.forwards
        self.halvings += cost.halvings
        self.cut_pieces += cost.cut_pieces
        return CycleOutput(
            outputs=outputs,
            forwards=cost.forwards,
            tokens=cost.tokens,
            padded_tokens=cost.padded_tokens,
            wave_s=middle - began - cost.beside_s,
            optim_s=time.perf_counter() - middle,
            beside_s=cost.beside_s,
        )

    def decoder(
        self,
        weights: Callable[[str], HostWeights],
        *,
        kv_tokens: int | None,
        text: TextOf | None,
        page_tokens: int | None = None,
        step_tokens: int | None = None,
        weights_bytes: int | None = None,
    ) -> EngineDecoder:
        """Return a decoder over this engine's base model, with key-value memory of its own.

        `weights(key)` gives sampler weights or raises WeightsGone; `text` decodes tokens, for stop
        strings. Sizes that are None suit the device: `kv_tokens` of key-value memory, `step_tokens` of
        prompts per step, `weights_bytes` of adapters kept on the device.
        """
        sizes = DecoderSizes(
            kv_tokens, page_tokens, step_tokens, weights_bytes, self._wave.head_chunk_rows
        )
        return EngineDecoder(self._base, weights, text, sizes)

    def check_device(self) -> None:
        """Raise DeviceLost if an error has left a device that cannot compute any more."""
        check_device(self._base.head_weight.device)

    def has(self, run: str) -> bool:
        """Return whether this engine holds the run's adapter."""
        return run in self._bank

    def drop(self, run: str) -> None:
        """Forget a run's adapter; twice is harmless."""
        self._bank.drop(run)

    def state(self, run: str) -> AdapterState:
        """Copy a run's adapter to the host. Raises KeyError for an unknown run."""
        return self._bank.state(run)

    def restore(self, run: str, state: AdapterState) -> None:
        """Put a state in place of whatever the run held. Raises ValueError if it does not fit."""
        self._bank.restore(run, state)

    def layout(self, run: str) -> Layout:
        """Return where the run's matrices lie in its arenas. Raises KeyError for an unknown run."""
        return self._bank[run].layout

    @property
    def safe_tokens(self) -> int:
        """Return how many tokens one pass of the base model has room for, as far as that is known."""
        return self._wave.safe_tokens

    @property
    def targets(self) -> Sequence[Target]:
        """Return the modules that adapters can be attached to."""
        return self._base.targets

    def layout_of(self, spec: AdapterSpec) -> Layout:
        """Return where the matrices of such an adapter lie in its arenas."""
        return self._bank.layout_of(spec)

    def _admit(
        self, ops: Sequence[Pass | ReverseKl], outputs: dict[tuple[str, int], Output]
    ) -> list[OpenPass]:
        """Open the passes that can run; write why the others cannot."""
        admitted = []
        for op in ops:
            if op.run not in self._bank:
                outputs[op.run, op.seq] = unknown_run()
                continue
            reason = self._refuse(op)
            if reason:
                outputs[op.run, op.seq] = Failure(reason, "user")
            else:
                admitted.append(OpenPass(op, self._bank[op.run]))
        return admitted

    def _refuse(self, op: Pass | ReverseKl) -> str | None:
        limits = (self.facts.vocab_size, self.facts.context_length)
        if isinstance(op, ReverseKl):
            return refuse_reverse_kl(op, *limits, layout_of=self.layout_of)
        return refuse_pass(op, *limits)

    def _step(self, op: OptimStep) -> Output:
        if op.run not in self._bank:
            return unknown_run()
        adapter, reason = self._bank[op.run], refuse_step(op)
        if reason:
            return Failure(reason, "user")
        norm = gradient_norm(adapter)
        if not norm < float("inf"):
            discard_gradient(adapter)
            return Failure(f"Gradient is not finite (seq {op.seq}); it was discarded.", "user")
        adamw_step(adapter, op, norm)
        return StepOutput(norm)


def model_facts(model: str, base: BaseModel, numerics: Numerics) -> ModelFacts:
    """Collect what the other processes may know."""
    modules: dict[Family, int] = {}
    for target in base.targets:
        modules[target.family] = modules.get(target.family, 0) + 1
    return ModelFacts(
        model=model,
        architecture=base.architecture,
        vocab_size=base.vocab_size,
        context_length=base.context_length,
        num_parameters=base.num_parameters,
        max_rank=base.hidden_size,  # beyond it LoRA is of no lower rank than the weights
        eos_token_ids=base.eos_token_ids,
        modules_by_family=modules,
        numerics=numerics,
    )


def make_cuda_deterministic() -> None:
    """Rule out atomics, TF32 and 16-bit reductions, for the whole process."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, when cuBLAS starts
    torch.use_deterministic_algorithms(mode=True)
    # Otherwise every new tensor is filled with NaN first.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
