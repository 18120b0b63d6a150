"""A merged model: the base model's weights plus the adapter's change, in the format of transformers.

Files are converted one after the other, so memory holds one of them. Where embeddings are tied and the adapter changes
the unembedding, the merged model gets an unembedding of its own. Otherwise the change would also move the embeddings.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cotrain.errors import ExportFailed
from cotrain.export.adapter import UNEMBED, Adapter
from cotrain.export.base import CONFIG, BaseFolder
from cotrain.export.libraries import library

_INDEX = "model.safetensors.index.json"


def unties(base: BaseFolder, adapter: Adapter) -> bool:
    """Return True if the merged model needs an unembedding that the base model does not have."""
    return base.is_tied and adapter.trains_unembedding


def write_merged(
    base: BaseFolder,
    adapter: Adapter,
    folder: Path,
    dtype: str | None,
    progress: Callable[[int, int], None],
) -> None:
    """Write the merged model to an empty folder, in the base model's dtype or in `dtype`.

    Sums are computed in float32 and rounded once. Raises ExportFailed if the base model lacks a module of
    the adapter, or has it in another shape.
    """
    safetensors = library("safetensors")
    save = library("safetensors.torch").save_file
    to = getattr(library("torch"), dtype) if dtype else None
    module_of = {base.name_on_disk(module): module for module in adapter.matrices}
    left, done, total = set(adapter.matrices), 0, base.size
    at: dict[str, str] = {}  # file by weight
    untie = unties(base, adapter)
    for file, names in base.files.items():
        tensors: dict[str, Any] = {}
        with safetensors.safe_open(base.path / file, "pt") as opened:
            for name in names:
                if name == base.head and base.is_tied:
                    continue  # a copy of the embedding, which transformers ignores
                weight = opened.get_tensor(name)
                if name == base.embedding and untie:
                    tensors[base.head] = _plus(adapter, UNEMBED, weight, to)
                    left.discard(UNEMBED)
                module = module_of.get(name, "")
                if module in left:
                    weight = _plus(adapter, module, weight, to)
                    left.discard(module)
                tensors[name] = weight.to(to) if to else weight
        save(tensors, folder / file, {"format": "pt"})
        at |= dict.fromkeys(tensors, file)
        done += (base.path / file).stat().st_size
        progress(done, total)
    if left and base.family in ("gpt_oss", "granitemoe"):
        raise ExportFailed(
            f"base: files of {base.family} hold all experts of a layer as one tensor, which cannot be merged here: "
            "export with --tinker and merge with tinker_cookbook.weights, or with --peft"
        )
    if left:
        raise ExportFailed(
            f"base: {base.path} has no weight of {min(left)}, which the adapter changes: it is another "
            "model than the run's"
        )
    if len(base.files) > 1 or _INDEX in {file.name for file in base.path.iterdir()}:
        size = sum((folder / file).stat().st_size for file in base.files)
        index = {"metadata": {"total_size": size}, "weight_map": at}
        (folder / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    config = dict(base.config)
    if untie:
        config["tie_word_embeddings"] = False
        if "text_config" in config:
            config["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    if dtype:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    for other in base.other_files():
        shutil.copyfile(other, folder / other.name)


def _plus(adapter: Adapter, module: str, weight: Any, to: Any) -> Any:
    change = adapter.change_of(module)
    if change.shape != weight.shape:
        raise ExportFailed(
            f"base: {module} has the shape {list(weight.shape)}, the adapter's change "
            f"{list(change.shape)}: it is another model than the run's"
        )
    return (weight.float() + change).to(to or weight.dtype)
