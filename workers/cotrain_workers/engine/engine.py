"""Training engine: executes the ops of one cycle and returns one result per op.

Forward and backward run over all passes of the cycle together, for any mix of adapter, rank, targets and loss.
All optimizer steps follow together. A run's results depend only on its own ops (bit-identical on CPU fp32).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch

from cotrain_workers.engine.adapters.bank import AdapterBank, adapter_budget
from cotrain_workers.engine.coordination import Yielding, run_to_end
from cotrain_workers.engine.decoding.decoder import EngineDecoder
from cotrain_workers.engine.decoding.kv_cache import DecoderSizes
from cotrain_workers.engine.decoding.requests import GrammarOf, TextOf
from cotrain_workers.engine.device import check_device, make_cuda_deterministic, memory_use
from cotrain_workers.engine.facts import ModelFacts, model_facts, numerics_of
from cotrain_workers.engine.host import keep_freed_memory, resident_bytes
from cotrain_workers.engine.lora.backend import BackendChoice, BackendName, find_backend
from cotrain_workers.engine.lora.quantized import Quantization
from cotrain_workers.engine.model import kernel_check
from cotrain_workers.engine.model.activation_checkpointing import RecomputePolicy
from cotrain_workers.engine.model.attention import use_flash_3
from cotrain_workers.engine.model.base_model import BaseModel, load_base_model, saved_with_adapters
from cotrain_workers.engine.model.fused_layers import fuse_layers
from cotrain_workers.engine.model.layer_kernels import find_softmax
from cotrain_workers.engine.model.unembedding import NewSoftmax, PlainSoftmax
from cotrain_workers.engine.ops import CycleOutput, HostWeights, Op, OpId, UpcomingBatch
from cotrain_workers.engine.running_cycle import RunningCycle
from cotrain_workers.engine.spec import Target, has_experts
from cotrain_workers.engine.training.forward_backward import ForwardBackward
from cotrain_workers.engine.training.memory_model import size_micro_batches
from cotrain_workers.engine.training.pass_state import OpenPasses

LoadBase = Callable[..., BaseModel]  # signature of `load_base_model`


class ProcessUse(NamedTuple):
    """Resources of one process of a worker."""

    runs: int
    memory_bytes: int  # resident memory in bytes


class Engine:
    """One frozen base model and the adapters of all runs that train on it. Not thread-safe."""

    def __init__(
        self, facts: ModelFacts, base: BaseModel, forward_backward: ForwardBackward, adapters: AdapterBank
    ) -> None:
        self.facts = facts
        self.adapters = adapters
        # Totals since the engine was loaded:
        self.base_forwards = 0
        self.halvings = 0  # of micro-batches that did not fit into memory
        # Cut slices of ops among those halvings. Such an op has other last bits than with more memory.
        self.cut_slices = 0
        self.open_passes = OpenPasses()
        adapters.on_drop = self.open_passes.drop
        self._base = base
        self._forward_backward = forward_backward

    @classmethod
    def load(
        cls,
        model: str,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        micro_batch_tokens: int | Literal["auto"] = "auto",
        head_chunk_rows: int = 1024,
        recompute: RecomputePolicy = "auto",
        lora_backend: BackendChoice = "auto",
        fusion: bool = True,
        adapter_bytes: int | None = None,
        host_bytes: int | None = None,
        local_files_only: bool = True,
        load_base: LoadBase = load_base_model,
        quantization: Quantization = "none",
    ) -> Engine:
        """Load a hub id or a folder; fp32 on CPU and bf16 on CUDA unless `dtype` is given.

        `adapter_bytes` of the device are for adapters (None: a share on CUDA, no limit on CPU). Idle adapters are
        offloaded to host memory, with `host_bytes` as the limit of `runs_to_evict`. "auto" for `micro_batch_tokens`
        measures the size on CUDA; the size is part of the numerics in any case. With `recompute` "auto", decoder layers
        that do not fit otherwise are recomputed. On CUDA, `fusion` replaces layers of the base model by kernels. The
        function `load_base` loads the base model, whole or in part. With `quantization`, the frozen linear weights have
        fewer bits.

        Set the number of threads before, because it is part of `facts.numerics_id`. For the whole process this turns on
        deterministic algorithms (CUDA), or keeps freed memory (CPU, a whole base model).

        Raises UnsupportedModel, BackendUnfit, KernelsBroken, TooLittleMemory, or OSError if there is no such model.
        """
        where = torch.device(device)
        dtype = dtype or (torch.bfloat16 if where.type == "cuda" else torch.float32)
        if where.type == "cuda":
            make_cuda_deterministic()
            use_flash_3(where)
        given = {} if quantization == "none" else {"quantization": quantization}
        base = load_base(model, device=where, dtype=dtype, local_files_only=local_files_only, **given)
        if where.type != "cuda" and not base.lock_step.sharding:
            # not with sharding: memory freed by one layer would not fit the next one
            keep_freed_memory()
        check_experts = partial(kernel_check.wrong_result, gate=base.router.expert_gate)
        lora = find_backend(
            lora_backend, base.targets, base.head_weight, base.router.linears,
            unfused_experts=base.router.unfused_experts,
            check_experts=check_experts if has_experts(base.targets) else None,
        )  # fmt: skip
        new_softmax, fused = fuse(base, lora.name) if fusion else (PlainSoftmax, ())
        if adapter_bytes is None and where.type == "cuda":
            adapter_bytes = cuda_adapter_bytes(where)
        new_forward_backward = partial(
            ForwardBackward, base, lora, head_chunk_rows=head_chunk_rows, new_softmax=new_softmax
        )
        budget = size_micro_batches(
            base, new_forward_backward, micro_batch_tokens, recompute, adapter_bytes=adapter_bytes or 0
        )
        forward_backward = new_forward_backward(
            micro_batch_tokens=budget.tokens,
            recompute=recompute,
            keep_tokens=budget.keep_tokens,
            save_tokens=budget.save_tokens,
        )
        adapters = AdapterBank(base.targets, where, dtype, adapter_bytes=adapter_bytes, host_bytes=host_bytes)
        adapters.base_weights = saved_with_adapters(base)
        numerics = numerics_of(
            base, where, dtype, micro_batch_tokens=budget.tokens, save_tokens=budget.save_tokens,
            head_chunk_rows=head_chunk_rows, lora=lora.name, adapter_bytes=adapter_bytes, fused=fused,
            quantization=quantization,
        )  # fmt: skip
        facts = model_facts(model, base, numerics, lora.fallback_reason, budget.longest_datum)
        return cls(facts, base, forward_backward, adapters)

    def run(self, ops: Sequence[Op]) -> CycleOutput:
        """Run one cycle to its end; see `cycle`."""
        return run_to_end(self.cycle(ops))

    def cycle(
        self,
        ops: Sequence[Op],
        allowances: Mapping[OpId, int] = MappingProxyType({}),
        is_over: Callable[[], bool] = lambda: False,
    ) -> Yielding[CycleOutput]:
        """Run one cycle: per run, ascending `seq`, `(Create | Import | Load)? (Pass | ReverseKl)*
        OptimStep? (Save | Load)*`.

        Every op gets an output; one that cannot run or yields NaN fails alone and leaves no trace.
        Yields after each micro-batch, save and load; a decoder of this engine may step there.

        `allowances` maps (run, seq) of a pass to tokens. Such a pass runs one slice, and more while the total stays
        within its allowance. Once `is_over` returns True, only one micro-batch of the pass that waited longest runs. A
        pass with slices left stays open and gets no output, nor do later ops of its run. A later cycle continues it if
        its adapter is still the same. The cuts change no bit, and the run's state is untouched until the pass ends.

        An exception means a broken engine: its adapters must then be restored from their last states.
        """
        cycle = RunningCycle(
            self.facts, self.adapters, self.open_passes, self._forward_backward,
            dict(allowances), is_over,
        )  # fmt: skip
        output = yield from cycle.run(ops)
        self.base_forwards += cycle.cost.forwards
        self.halvings += cycle.cost.halvings
        self.cut_slices += cycle.cost.cut_slices
        return output

    def decoder(
        self,
        weights: Callable[[str], HostWeights],
        *,
        kv_tokens: int | None,
        text: TextOf | None,
        grammar_of: GrammarOf | None = None,
        page_tokens: int | None = None,
        step_tokens: int | None = None,
        weights_bytes: int | None = None,
    ) -> EngineDecoder:
        """Return a decoder over this engine's base model, with key-value memory of its own.

        `weights(key)` returns sampler weights or raises WeightsMissing. `text` decodes tokens, for stop strings, and
        `grammar_of` compiles grammars. A size of None selects a default for the device: `kv_tokens` of key-value
        memory, `step_tokens` of prompts per step, `weights_bytes` of adapters kept on the device.
        """
        sizes = DecoderSizes(kv_tokens, page_tokens, step_tokens, weights_bytes, self._forward_backward.head_chunk_rows)
        return EngineDecoder(self._base, weights, text, sizes, grammar_of)

    def check_device(self) -> None:
        """Raise DeviceLost if an error has left the device unable to compute."""
        check_device(self._base.head_weight.device)

    @property
    def device_memory(self) -> tuple[int, int]:
        """Bytes in use on the device, and its total; zeros on a CPU. Any thread may read it."""
        return memory_use(self._base.head_weight.device)

    @property
    def processes(self) -> Sequence[ProcessUse]:
        """Runs and resident memory of this process. Any thread may read it."""
        runs = sum(count for count, _ in self.adapters.by_tier.values())
        return (ProcessUse(runs, resident_bytes()),)

    @property
    def safe_tokens(self) -> int:
        """Number of tokens that are known to fit into one pass of the base model."""
        return self._forward_backward.safe_tokens

    def watch_micro_batches(self, watch: Callable[[UpcomingBatch], AbstractContextManager[None]]) -> None:
        """Run each micro-batch of passes within `watch(batch)` from now on."""
        self._forward_backward.watch = watch

    def spare_memory(self, tokens: int) -> None:
        """Use less host memory for micro-batches of this size after one crashed a process. Results do not change."""
        if self._base.head_weight.device.type == "cpu":
            self._forward_backward.spare_memory(tokens)

    @property
    def recomputes(self) -> bool:
        """True if micro-batches of the full size recompute their decoder layers."""
        return self._forward_backward.limits.recomputes(self.facts.numerics.micro_batch_tokens)

    @property
    def targets(self) -> Sequence[Target]:
        """Modules that adapters can be attached to."""
        return self._base.targets


def fuse(base: BaseModel, lora: BackendName) -> tuple[NewSoftmax, tuple[str, ...]]:
    """Replace layers of the base model by kernels; return the softmax of its head, and the names of all kernels."""
    if lora != "fused":
        on_cuda = base.head_weight.device.type == "cuda"
        return PlainSoftmax, fuse_layers(base, in_products=False) if on_cuda else ()
    fused = fuse_layers(base, in_products=True)
    new_softmax = find_softmax(base.head_weight, base.final_softcap)
    return new_softmax, fused if new_softmax is PlainSoftmax else (*fused, "softmax")


def cuda_adapter_bytes(device: torch.device) -> int:
    """Return the default bytes for adapters on a GPU that holds only the base model."""
    total: int = torch.cuda.get_device_properties(device).total_memory
    return adapter_budget(total, torch.cuda.memory_allocated(device))
