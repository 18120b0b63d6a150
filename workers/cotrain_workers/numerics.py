"""All that may change a bit of a result under one plan: hardware, libraries, threads, sizes."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
import transformers

from cotrain_workers import attn, pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotrain_workers.lora_backend import Choice


@dataclass(frozen=True)
class Numerics:
    """What an engine computes with. Equal ones give, for the same plan, the same bits."""

    device: str  # "cpu" or "cuda"
    hardware: str
    threads: int  # of the CPU; 0 where it computes nothing
    dtype: str  # of the base model: "float32"
    torch: str
    transformers: str
    padding: str
    micro_batch_tokens: int
    head_chunk_rows: int
    lora: Choice = "seg"  # the backend; recordings from before there was a choice do not name it
    adapter_bytes: int = 0  # of a GPU, where who computes together moves bits; 0 on a CPU
    fused: str = ""  # what of the base model is compiled: "gate norm rope"

    @property
    def id(self) -> str:
        """Name them in 16 characters."""
        return hashlib.sha256(repr(asdict(self)).encode()).hexdigest()[:16]

    def differences(self, other: Numerics) -> list[str]:
        """Say where `other` is not the same, one phrase each."""
        ours, theirs = asdict(self), asdict(other)
        return [
            f"{name} {ours[name]}, now {theirs[name]}"
            for name in ours
            if ours[name] != theirs[name]
        ]


def numerics_of(
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    lora: Choice,
    adapter_bytes: int | None,
    fused: Sequence[str] = (),
) -> Numerics:
    """Read them off this process; `sizes` are tokens per micro-batch and rows per head chunk.

    `adapter_bytes` decides which adapters of a cycle that are too many compute together.
    """
    is_cuda = device.type == "cuda"
    return Numerics(
        device=device.type,
        hardware=cuda_hardware(device) if is_cuda else torch.backends.cpu.get_cpu_capability(),
        threads=0 if is_cuda else torch.get_num_threads(),
        dtype=str(dtype).removeprefix("torch."),
        torch=torch.__version__,
        transformers=transformers.__version__,
        padding=f"{pack.FINE_STEP}/{pack.FINE_LIMIT}/{pack.COARSE_STEP}",
        micro_batch_tokens=sizes[0],
        head_chunk_rows=sizes[1],
        lora=lora,
        adapter_bytes=(adapter_bytes or 0) if is_cuda else 0,
        fused=" ".join(fused),
    )


def cuda_hardware(device: torch.device) -> str:
    """Name a GPU, and what decides which kernels run on it."""
    name = torch.cuda.get_device_name(device)
    return f"{name} cuda {torch.version.cuda} {sorted(attn.varlen_parameters())}"
