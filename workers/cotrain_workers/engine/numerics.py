"""All that may change a bit of a result under one plan: hardware, libraries, threads, sizes."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from cotrain_workers.engine import routing
from cotrain_workers.engine.lora.backend import Choice
from cotrain_workers.engine.model import attention as attn

CPUINFO = Path("/proc/cpuinfo")
#: By these MKL and oneDNN choose their kernels, and so by how large the caches are.
DISTINGUISHED_BY = ("vendor_id", "cpu family", "model", "stepping", "cache size", "flags")
#: Environment variables that overrule them.
OVERRULED_BY = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


@dataclass(frozen=True)
class Numerics:
    """What an engine computes with. Equal ones give, for the same plan, the same bits."""

    device: str  # "cpu" or "cuda"
    hardware: str  # which GPU or processor, and what was said to the libraries about it
    threads: int  # of the CPU; 0 where it computes nothing
    dtype: str  # of the base model: "float32"
    torch: str
    transformers: str
    padding: str
    micro_batch_tokens: int
    head_chunk_rows: int
    lora: Choice = "seg"  # the backend; recordings from before there was a choice do not name it
    adapter_bytes: int = 0  # of a GPU, where who computes together moves bits; 0 on a CPU
    fused: str = ""  # where the base model has kernels: "norms heads mlp"
    # Who holds the base model: "fsdp2/4" for four processes. Said, and not compared: gathered weights are the
    # same bits, and nothing that is computed is added up across processes.
    sharding: str = ""

    @property
    def id(self) -> str:
        """Name them in 16 characters."""
        return hashlib.sha256(repr(_compared(self)).encode()).hexdigest()[:16]

    def differences(self, other: Numerics) -> list[str]:
        """Say where `other` is not the same, one phrase each."""
        ours, theirs = _compared(self), _compared(other)
        return [
            f"{name} {ours[name]}, now {theirs[name]}"
            for name in ours
            if ours[name] != theirs[name]
        ]


def _compared(numerics: Numerics) -> dict[str, object]:
    named = asdict(numerics)
    del named["sharding"]
    return named


def numerics_of(
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    lora: Choice,
    adapter_bytes: int | None,
    fused: Sequence[str] = (),
    sharding: str = "",
) -> Numerics:
    """Read them off this process; `sizes` are tokens per micro-batch and rows per head chunk.

    `adapter_bytes` decides which adapters of a cycle that are too many compute together.
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
    )


def cuda_hardware(device: torch.device) -> str:
    """Name a GPU, and what decides which kernels run on it."""
    name = torch.cuda.get_device_name(device)
    flash = f"{attn.flash_in_use()} {sorted(attn.varlen_parameters())}"
    return f"{name} cuda {torch.version.cuda} {flash}"


def cpu_hardware() -> str:
    """Name a processor, and what decides which kernels run on it; two with AVX-512 may differ in bits."""
    capability = torch.backends.cpu.get_cpu_capability()
    processor = processor_of(CPUINFO.read_text()) if CPUINFO.exists() else platform.machine()
    overruled = [f"{name}={os.environ[name]}" for name in OVERRULED_BY if name in os.environ]
    return " ".join([capability, processor, *overruled])


def processor_of(cpuinfo: str) -> str:
    """Name the first processor of Linux' `cpuinfo`: its maker and model, and a digest of all that counts."""
    first = cpuinfo.split("\n\n", maxsplit=1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    known = [facts[name] for name in DISTINGUISHED_BY if name in facts] or sorted(facts.values())
    digest = hashlib.sha256(repr(known).encode()).hexdigest()[:8]
    return " ".join([facts.get("vendor_id", platform.machine()), facts.get("model", ""), digest])
