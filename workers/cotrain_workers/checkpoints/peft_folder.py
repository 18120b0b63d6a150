"""Adapters as PEFT folders, named by what is in them: written whole or not at all, checked when read.

A folder is `<root>/<digest[:2]>/<digest>/` with `adapter_model.safetensors` (fp32, PEFT's names) and
`adapter_config.json`: plain PEFT, vLLM and merge tools read it as it is. With them are their SHA256SUMS.

The unembedding is `lm_head`, also where it is tied to the embeddings. There it cannot be merged: one
matrix would change both, and the cookbook's tools refuse. Under the cookbook's own name for it they
would merge all the same (logits of a tiny model off by 4), and their conversion for serving loses it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from cotrain_store.disk.checksums import SUMS, sums_of
from cotrain_store.disk.durable_files import passes
from cotrain_store.failpoints import failpoint
from cotrain_workers.engine.ops import HostWeights
from cotrain_workers.engine.spec import AdapterSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from cotrain_workers.engine.spec import Layout

    LayoutOf = Callable[[AdapterSpec], Layout]

FORMAT = "cotrain-adapter-1"
TENSORS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
#: What a reader of the config multiplies and attaches by; the rest of it is for show.
_DECISIVE = ("peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "use_dora")


class FolderUnreadable(Exception):
    """An adapter's folder is missing, torn, or holds something other than its name says."""


@dataclass(frozen=True)
class WrittenFolder:
    """A durable adapter: the digest that names it, where it lies, the bytes of its files."""

    digest: str
    path: Path
    size: int


def digest(spec: AdapterSpec, base_model: str, flat: torch.Tensor) -> str:
    """Return the SHA-256 (hex) of an adapter: its spec, its base model's name, its arena's fp32 bytes."""
    header = json.dumps([FORMAT, base_model, asdict(spec)], sort_keys=True)
    hasher = hashlib.sha256(header.encode() + b"\0")
    hasher.update(flat.numpy().astype("<f4", copy=False).data)
    return hasher.hexdigest()


def folder_of(root: Path, digest: str) -> Path:
    """Return where the adapter of this digest lies, whether or not it has been written."""
    return root / digest[:2] / digest


def write_folder(
    root: Path, weights: HostWeights, layout: Layout, base_model: str
) -> WrittenFolder:
    """Write an adapter, durable under its final name when this returns.

    Twice is harmless, also from two processes at once: equal content has one name, and the one that comes
    second finds it there. A damaged folder of that name is replaced.
    """
    name = digest(weights.spec, base_model, weights.flat)
    path = folder_of(root, name)
    if not _is_whole(path, layout):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{name}.{uuid4().hex}")
        _write_files(unfinished, weights, layout, base_model, name)
        failpoint("weights.before_rename")
        _rename_into_final(unfinished, path, layout)
        failpoint("weights.renamed")
    # Found there, it may have been named by a process that died before it could do this.
    _sync(path.parent)
    _sync(root)
    return WrittenFolder(name, path, sum(file.stat().st_size for file in path.iterdir()))


def read_folder(path: Path, layout_of: LayoutOf) -> HostWeights:
    """Read an adapter back, equal to the bit; `layout_of` gives the arena of a spec on this base model.

    Raises:
        FolderUnreadable: a file is missing or torn, or its tensors are not those that the folder's
            name and its spec on this base model stand for.
        OSError: this process cannot read anything now.
    """
    try:
        content = (path / TENSORS).read_bytes()
        config = json.loads((path / CONFIG).read_bytes())
        header = _metadata(content)
        spec, base_model = AdapterSpec(**json.loads(header["spec"])), header["base_model"]
        layout = layout_of(spec)
        flat = _arena(load(content), layout)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as broken:
        if passes(broken):
            raise
        raise FolderUnreadable(f"Adapter {path.name} cannot be read: {broken!r}.") from broken
    if not digest(spec, base_model, flat) == header["sha256"] == path.name:
        raise FolderUnreadable(f"Adapter {path.name} holds other weights than its name says.")
    expected = adapter_config(spec, layout, base_model)
    if any(config.get(key) != expected[key] for key in _DECISIVE):
        raise FolderUnreadable(f"Adapter {path.name} has another {CONFIG} than was written.")
    return HostWeights(spec, flat)


def remove_folder(root: Path, digest: str) -> None:
    """Delete an adapter's folder; under its final name it is whole or gone. Twice is harmless."""
    _set_aside(folder_of(root, digest))


def adapter_config(spec: AdapterSpec, layout: Layout, base_model: str) -> dict[str, object]:
    """Return the content of `adapter_config.json`; the stored matrices are not scaled by `alpha / r`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": spec.rank,
        "lora_alpha": int(spec.alpha) if spec.alpha.is_integer() else spec.alpha,
        "target_modules": sorted({target.name.rsplit(".", 1)[-1] for target in layout.targets}),
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "auto_mapping": None,
    }


def tensor_names(module: str) -> tuple[str, str]:
    """Return PEFT's names of a module's A `[rank, inputs]` and B `[outputs, rank]`."""
    return tuple(f"base_model.model.{module}.lora_{letter}.weight" for letter in "AB")  # type: ignore[return-value]


def _write_files(
    folder: Path, weights: HostWeights, layout: Layout, base_model: str, name: str
) -> None:
    header = {
        "format": "pt",  # transformers and vLLM look for it
        "cotrain": FORMAT,
        "spec": json.dumps(asdict(weights.spec)),
        "base_model": base_model,
        "sha256": name,
    }
    tensors = {}
    for module, pair in layout.views(weights.flat).items():
        name_a, name_b = tensor_names(module)
        tensors[name_a], tensors[name_b] = pair.a.contiguous(), pair.b.contiguous()
    config = json.dumps(adapter_config(weights.spec, layout, base_model), indent=2)
    contents = {TENSORS: save(tensors, header), CONFIG: f"{config}\n".encode()}
    folder.mkdir()
    (folder / TENSORS).write_bytes(contents[TENSORS])
    failpoint("weights.half_written")
    (folder / CONFIG).write_bytes(contents[CONFIG])
    # For the API, which sends the files and cannot compute their digest.
    (folder / SUMS).write_text(sums_of(contents))
    for path in (folder / TENSORS, folder / CONFIG, folder / SUMS, folder):
        _sync(path)


def _rename_into_final(unfinished: Path, path: Path, layout: Layout) -> None:
    """Give a written folder its name, unless another process was first."""
    try:
        unfinished.rename(path)
    except OSError:  # POSIX renames no folder over one that has files
        if _is_whole(path, layout):
            shutil.rmtree(unfinished)
        else:
            _set_aside(path)
            unfinished.rename(path)


def _set_aside(path: Path) -> None:
    """Take a folder's name away at once, then delete it."""
    aside = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside)


def _is_whole(path: Path, layout: Layout) -> bool:
    try:
        read_folder(path, lambda _: layout)
    except FolderUnreadable:
        return False
    return True


def _arena(tensors: Mapping[str, torch.Tensor], layout: Layout) -> torch.Tensor:
    """Lay out tensors in an arena; raises ValueError unless they are exactly the layout's."""
    flat = torch.zeros(layout.size)
    left = dict(tensors)
    for module, pair in layout.views(flat).items():
        for name, target in zip(tensor_names(module), pair, strict=True):
            tensor = left.pop(name)
            if tensor.shape != target.shape or tensor.dtype != torch.float32:
                raise ValueError(f"{name} is {tensor.dtype} of shape {list(tensor.shape)}")
            target.copy_(tensor)
    if left:
        raise ValueError(f"unexpected tensors, {min(left)} first")
    return flat


def _metadata(content: bytes) -> dict[str, str]:
    length = int.from_bytes(content[:8], "little")
    metadata: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
    return metadata


def _sync(path: Path) -> None:
    """Make a file's bytes, or a folder's names, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
