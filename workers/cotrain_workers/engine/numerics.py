"""Conditions that may change a bit of a result under one plan: hardware, libraries, threads, sizes."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from cotrain_workers.engine import routing
from cotrain_workers.engine.lora.backend import Choice
from cotrain_workers.engine.model import attention as attn

CPUINFO = Path("/proc/cpuinfo")
#: Fields of cpuinfo by which MKL and oneDNN choose their kernels, including the cache size.
DISTINGUISHED_BY = ("vendor_id", "cpu family", "model", "stepping", "cache size", "flags")
#: Environment variables that override that choice.
OVERRULED_BY = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


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
    lora: Choice = "seg"  # the backend; old recordings lack it
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
        return [
            f"{name} {ours.get(name, 'none')}, now {theirs.get(name, 'none')}"
            for name in {**ours, **theirs}
            if ours.get(name) != theirs.get(name)
        ]


def _compared(numerics: Numerics) -> dict[str, object]:
    named = asdict(numerics)
    del named["sharding"]
    if numerics.quantization == "none":  # as in older records
        del named["quantization"]
    if not numerics.images:
        del named["images"]
    if not numerics.save_tokens:
        del named["save_tokens"]
    return named


def numerics_of(
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    lora: Choice,
    adapter_bytes: int | None,
    fused: Sequence[str] = (),
    sharding: str = "",
    quantization: str = "none",
    images: str = "",
    save_tokens: int = sys.maxsize,
) -> Numerics:
    """Return the numerics of this process; `sizes` are tokens per micro-batch and rows per head
    chunk.

    `adapter_bytes` determines which adapters compute together if a cycle has too many.
    """
    is_cuda = device.type == "cuda"
    return Numerics(
        device=device.type,
        hardware=cuda_hardware(device) if is_cuda else cpu_hardware(),
        threads=0 if is_cuda else torch.get_num_threads(),
        dtype=str(dtype).removeprefix("torch."),
        torch=torch.__version__,
        transformers=transformers.__version__,
        padding=f"{routing.FINE_STEP}/{routing.FINE_LIMIT}/{routing.COARSE_STEP}",
        micro_batch_tokens=sizes[0],
        head_chunk_rows=sizes[1],
        lora=lora,
        adapter_bytes=(adapter_bytes or 0) if is_cuda else 0,
        fused=" ".join(fused),
        sharding=sharding,
        quantization=quantization,
        images=images,
        save_tokens=0 if save_tokens == sys.maxsize else save_tokens,
    )


def cuda_hardware(device: torch.device) -> str:
    """Return the name of a GPU, and the conditions that select its kernels."""
    name = torch.cuda.get_device_name(device)
    flash = f"{attn.flash_in_use()} {sorted(attn.varlen_parameters())}"
    return f"{name} cuda {torch.version.cuda} {flash}"


def cpu_hardware() -> str:
    """Return the name of a processor, and the conditions that select its kernels. Two with AVX-512
    may differ in bits.
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
