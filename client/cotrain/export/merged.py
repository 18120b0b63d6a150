"""A merged model: the base model's weights plus the adapter's change, in the format of transformers.

Files are converted one after the other, so memory holds one of them. Where embeddings are tied and the adapter changes
the unembedding, the merged model gets an unembedding of its own. Otherwise the change would also move the embeddings.
"""

import json
import shutil
from collections.abc import Callable, Sequence
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
    base: BaseFolder, adapter: Adapter, folder: Path, dtype: str | None, progress: Callable[[int, int], None]
) -> None:
    """Write the merged model to an empty folder, in the base model's dtype or in `dtype`.

    Sums are computed in float32 and rounded once. Raises ExportFailed if the base model lacks a module of
    the adapter, or has it in another shape.
    """
    safetensors = library("safetensors")
    save = library("safetensors.torch").save_file
    to = getattr(library("torch"), dtype) if dtype else None
    modules_of: dict[str, list[str]] = {}  # by weight
    for module in adapter.matrices:
        for name in base.names_on_disk(module):
            modules_of.setdefault(name, []).append(module)
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
                    tensors[base.head] = _plus(base, adapter, [UNEMBED], weight, to)
                    left.discard(UNEMBED)
                modules = modules_of.get(name, [])
                if modules and left.issuperset(modules):
                    weight = _plus(base, adapter, modules, weight, to)
                    left.difference_update(modules)
                tensors[name] = weight.to(to) if to else weight
        save(tensors, folder / file, {"format": "pt"})
        at |= dict.fromkeys(tensors, file)
        done += (base.path / file).stat().st_size
        progress(done, total)
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


def _plus(base: BaseFolder, adapter: Adapter, modules: Sequence[str], weight: Any, to: Any) -> Any:
    """Return a weight with the change of a module, or of the modules of all experts, expert by expert."""
    torch = library("torch")
    experts = weight if weight.dim() > 2 else weight[None]
    found = torch.empty_like(experts, dtype=to or weight.dtype)
    count = len(modules) // len(experts)  # gate and up of an expert are one matrix
    for number in range(len(experts)):
        own = modules[number * count : (number + 1) * count]
        change = torch.cat([adapter.change_of(each) for each in own or modules])
        is_other = change.shape != experts.shape[1:]
        if weight.dim() > 2 and (is_other or base.family == "gpt_oss"):
            change = change.mT  # inputs before outputs
        if change.shape != experts.shape[1:]:
            raise ExportFailed(
                f"base: {modules[0]} has the shape {list(weight.shape)}, the adapter's change "
                f"{list(change.shape)}: it is another model than the run's"
            )
        found[number] = experts[number].float() + change
    return found.reshape(weight.shape)
