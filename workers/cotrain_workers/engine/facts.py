"""Facts about an engine for other processes: its base model, and its numerics.

Numerics are the conditions that may change a bit of a result under one plan: hardware, libraries, threads, sizes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from cotrain_workers.engine import routing
from cotrain_workers.engine.lora.backend import BackendName
from cotrain_workers.engine.model import attention as attn
from cotrain_workers.engine.model.base_model import BaseModel
from cotrain_workers.engine.model.expert_choice import ExpertChoices
from cotrain_workers.engine.model.vision import DECODER, ImageFacts
from cotrain_workers.engine.spec import Family

CPUINFO = Path("/proc/cpuinfo")
#: Fields of cpuinfo by which MKL and oneDNN choose their kernels, including the cache size.
DISTINGUISHED_BY = ("vendor_id", "cpu family", "model", "stepping", "cache size", "flags")
#: Environment variables that override that choice.
OVERRULED_BY = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the base model and this engine."""

    model: str  # as given to `Engine.load`
    architecture: str
    vocab_size: int  # rows of the embedding, padded ones included
    context_length: int
    num_parameters: int
    max_rank: int
    tied_embeddings: bool  # whether the unembedding is the embedding's matrix
    eos_token_ids: tuple[int, ...]  # tokens that end a generation, ascending; may be empty
    modules_by_family: Mapping[Family, int]  # number of modules that each train_* flag covers
    numerics: Numerics
    lora_fallback: str  # why LoRA is not computed by the fastest backend; empty where it is, and on a CPU
    longest_datum: int = 0  # tokens of a datum that fits into memory
    expert_choices: ExpertChoices | None = None  # None: no experts, or given ones cannot be used
    images: ImageFacts | None = None  # None: the model reads text only

    @property
    def numerics_id(self) -> str:
        """Identifier of the numerics. With equal ids, the same plan produces the same bits."""
        return self.numerics.id


def model_facts(model: str, base: BaseModel, numerics: Numerics, lora_fallback: str, longest_datum: int) -> ModelFacts:
    """Collect the facts about a base model and its engine; a `longest_datum` of 0 is the context length."""
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
        tied_embeddings=base.tied_embeddings,
        eos_token_ids=base.eos_token_ids,
        modules_by_family=modules,
        numerics=numerics,
        lora_fallback=lora_fallback,
        longest_datum=min(longest_datum or base.context_length, base.context_length),
        expert_choices=base.expert_choices,
        images=base.vision.facts if base.vision else None,
    )


@dataclass(frozen=True)
class Numerics:
    """Numerical environment of an engine. Equal ones produce the same bits for the same plan."""

    device: str  # "cpu" or "cuda"
    hardware: str  # GPU or processor, and overrides of its libraries
    threads: int  # of the CPU; 0 on a GPU
    dtype: str  # of the base model: "float32"
    torch: str
    transformers: str
    padding: str
    micro_batch_tokens: int
    head_chunk_rows: int
    # Old recordings lack the fields from here on.
    lora: BackendName = "seg"
    adapter_bytes: int = 0  # of a GPU, where the grouping of adapters moves bits; 0 on a CPU
    fused: str = ""  # layers of the base model with kernels: "norms heads mlp"
    # Processes that hold the base model: "fsdp2/4" for four. It is reported but not compared:
    # gathered weights have the same bits, and no sum crosses processes.
    sharding: str = ""
    quantization: str = "none"  # of the frozen weights
    images: str = ""  # library that decodes them, with its version; empty for a model of text
    save_tokens: int = 0  # above which MLPs compute in chunks of rows; 0: never

    @property
    def id(self) -> str:
        """Identifier of 16 characters."""
        return hashlib.sha256(repr(_compared(self)).encode()).hexdigest()[:16]

    def differences(self, other: Numerics) -> list[str]:
        """Return the differences to `other`, one phrase each."""
        ours, theirs = _compared(self), _compared(other)
        changed = (name for name in ours if ours[name] != theirs[name])
        return [f"{name} {ours[name] or 'none'}, now {theirs[name] or 'none'}" for name in changed]


def _compared(numerics: Numerics) -> dict[str, object]:
    return {name: value for name, value in asdict(numerics).items() if name != "sharding"}


def numerics_of(
    base: BaseModel,
    device: torch.device,
    dtype: torch.dtype,
    *,
    micro_batch_tokens: int,
    save_tokens: int,
    head_chunk_rows: int,
    lora: BackendName,
    adapter_bytes: int | None,
    fused: Sequence[str],
    quantization: str,
) -> Numerics:
    """Return the numerics of this process.

    `adapter_bytes` determines which adapters compute together if a cycle has too many.
    """
    is_cuda = device.type == "cuda"
    return Numerics(
        device=device.type,
        hardware=_cuda_hardware(device) if is_cuda else cpu_hardware(),
        threads=0 if is_cuda else torch.get_num_threads(),
        dtype=str(dtype).removeprefix("torch."),
        torch=torch.__version__,
        transformers=transformers.__version__,
        padding=f"{routing.FINE_STEP}/{routing.FINE_LIMIT}/{routing.COARSE_STEP}",
        micro_batch_tokens=micro_batch_tokens,
        head_chunk_rows=head_chunk_rows,
        lora=lora,
        adapter_bytes=(adapter_bytes or 0) if is_cuda else 0,
        fused=" ".join(fused),
        sharding=base.lock_step.sharding,
        quantization=quantization,
        images=DECODER if base.vision else "",
        save_tokens=0 if save_tokens == sys.maxsize else save_tokens,
    )


def _cuda_hardware(device: torch.device) -> str:
    """Return the name of a GPU, and the conditions that select its kernels."""
    name = torch.cuda.get_device_name(device)
    flash = f"{attn.flash_in_use()} {sorted(attn.varlen_parameters())}"
    return f"{name} cuda {torch.version.cuda} {flash}"


def cpu_hardware() -> str:
    """Return the name of a processor, and the conditions that select its kernels.

    Two processors with AVX-512 may differ in bits.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    processor = processor_of(CPUINFO.read_text()) if CPUINFO.exists() else platform.machine()
    overruled = [f"{name}={os.environ[name]}" for name in OVERRULED_BY if name in os.environ]
    return " ".join([capability, processor, *overruled])


def processor_of(cpuinfo: str) -> str:
    """Return the vendor and model of the first processor in Linux' `cpuinfo`, and a digest of DISTINGUISHED_BY."""
    first = cpuinfo.split("\n\n", maxsplit=1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    known = [facts[name] for name in DISTINGUISHED_BY if name in facts] or sorted(facts.values())
    digest = hashlib.sha256(repr(known).encode()).hexdigest()[:8]
    return " ".join([facts.get("vendor_id", platform.machine()), facts.get("model", ""), digest])
