"""Loader of one member's part of a base model, which holds some rows of each matrix.

FSDP2 gathers the rows of a layer from all members when the layer runs, and frees them afterwards. The
unembedding is not divided, because the head multiplies by it chunk by chunk.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from cotrain_workers.engine.device import is_out_of_memory
from cotrain_workers.engine.model.base_model import (
    BaseModel,
    find_targets,
    make_base_model,
    make_skeleton,
    refuse_too_large,
)
from cotrain_workers.engine.model.configuration import UnsupportedModel, refuse_type, refuse_unsupported
from cotrain_workers.engine.model.families import MODEL_TYPES
from cotrain_workers.engine.model.model_source import (
    EMBEDDING,
    HEAD,
    NoModel,
    UnusableModel,
    model_too_large,
    read_config,
    refuse_absent,
    refuse_not_finite,
    refuse_unused,
    report,
    untied,
)
from cotrain_workers.engine.spec import has_experts
from cotrain_workers.group.lock_step import GroupLockStep

INDEX, ONE_FILE = "model.safetensors.index.json", "model.safetensors"
#: Number of rows that a comparison of two stored matrices reads at once.
_COMPARED_ROWS = 4096


def load_sharded(
    model: str, *, device: torch.device, dtype: torch.dtype, local_files_only: bool, lock_step: GroupLockStep
) -> BaseModel:
    """Load this member's part of a hub id or a folder. Return when all members have loaded theirs.

    Raises the errors of `load_base_model`, and NoModel if the weights are not in safetensors.
    """
    try:
        base = _load(model, device, dtype, lock_step, local_files_only=local_files_only)
    except UnusableModel as unusable:
        raise type(unusable)(f"Base model {model} cannot be served: {unusable}") from unusable
    lock_step.use_for_fillers(base)
    report(f"its part of the base model takes {own_bytes(base) / 1e9:.2g} GB")
    lock_step.links.await_all()
    return base


def _load(
    model: str, device: torch.device, dtype: torch.dtype, lock_step: GroupLockStep, *, local_files_only: bool
) -> BaseModel:
    links = lock_step.links
    report(f"reading the configuration of base model {model}")
    config = read_config(model, refuse_type, local_files_only=local_files_only)
    refuse_unsupported(config)
    if MODEL_TYPES[config.model_type].is_wrapper:
        raise UnsupportedModel("a group of processes cannot divide a model with a vision tower: use --group-size 1.")
    network = make_skeleton(config, dtype)
    if has_experts(find_targets(network)):
        raise UnsupportedModel(
            "it is a mixture of experts, which a group of processes does not divide yet: serve it with one process."
        )
    network.eval().requires_grad_(requires_grad=False)
    head_bytes = network.lm_head.weight.numel() * dtype.itemsize
    whole_bytes = network.num_parameters() * dtype.itemsize
    part_bytes = (whole_bytes - head_bytes) // links.size + head_bytes
    if device.type == "cpu":
        refuse_too_large(part_bytes * links.size)  # all members share this host
    report(
        f"loading part {links.number} of {links.size} of its weights, {part_bytes / 1e9:.2g} of "
        f"{whole_bytes / 1e9:.2g} GB"
    )
    base = make_base_model(network, config, lock_step)
    files = weight_files(model, local_files_only=local_files_only)
    try:
        shard(network, device, links.size)
        read_rows(network, files)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise model_too_large() from error
        raise
    return replace(base, head_weight=network.lm_head.weight)


def shard(network: Any, device: torch.device, size: int) -> None:
    """Allocate this process' part of a model without storage (device `meta`), divided over `size` processes.

    The part is uninitialized. Buffers are filled, because no file holds them.
    """
    head = network.lm_head.weight
    is_tied = network.get_input_embeddings().weight is head
    buffers = computed_buffers(network, device)
    mesh = init_device_mesh(device.type, (size,))
    for layer in network.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    ignored = {head} if is_tied else set()
    fully_shard(network.model, mesh=mesh, reshard_after_forward=True, ignored_params=ignored)
    network.model.to_empty(device=device)  # also discards the values of its buffers
    if is_tied:
        network.lm_head.weight = network.model.embed_tokens.weight
    else:
        network.lm_head.to_empty(device=device)
    for name, buffer in buffers.items():
        owner, _, last = name.rpartition(".")
        network.get_submodule(owner)._buffers[last] = buffer


def computed_buffers(network: Any, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the buffers that no file holds, with values: rotary frequencies, the factor of Gemma's embedding.

    `_init_weights` of transformers fills them. It writes to no parameter, because these have no storage yet.
    """
    found: dict[str, torch.Tensor] = {}
    for path, module in network.named_modules():
        own = dict(module.named_buffers(recurse=False))
        for name, buffer in own.items():
            module._buffers[name] = torch.empty_like(buffer, device=device)
        if own:
            with torch.no_grad():
                network._init_weights(module)
        found |= {f"{path}.{name}".lstrip("."): module._buffers[name] for name in own}
    return found


def weight_files(model: str, *, local_files_only: bool) -> dict[str, Path]:
    """Return the file of each tensor. Raises NoModel."""
    try:
        folder, patterns = Path(model), ["*.json", "*.safetensors"]
        if not folder.is_dir():
            folder = Path(snapshot_download(model, local_files_only=local_files_only, allow_patterns=patterns))
        if (folder / INDEX).is_file():
            index: Mapping[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
            return {name: folder / file for name, file in index.items()}
        if (folder / ONE_FILE).is_file():
            with safe_open(folder / ONE_FILE, "pt") as file:
                return dict.fromkeys(file.keys(), folder / ONE_FILE)
    except Exception as error:
        raise _unreadable(error) from error
    raise NoModel(f"its weights are no safetensors ({ONE_FILE}, {INDEX}), which a group reads.")


@torch.no_grad()
def read_rows(network: nn.Module, files: Mapping[str, Path]) -> None:
    """Fill each parameter with this member's rows.

    Raises NoModel if a parameter is missing or not finite, or if a tensor belongs to no parameter.
    """
    parameter_by_name = dict(network.named_parameters())
    refuse_absent(parameter_by_name.keys() - files.keys())
    extra = files.keys() - parameter_by_name.keys()
    refuse_unused(name for name in extra if not _is_ignored(name, network))
    if HEAD in extra:
        _refuse_other_head(files)
    names_by_file: dict[Path, list[str]] = {}
    for name in parameter_by_name:
        names_by_file.setdefault(files[name], []).append(name)
    for path, names in names_by_file.items():
        with _opened(path) as file:
            for name in names:
                _fill(parameter_by_name[name], file.get_slice(name), name)


def _opened(path: Path) -> Any:
    """Open a file of tensors. Raises NoModel."""
    try:
        return safe_open(path, "pt")
    except Exception as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> NoModel:
    return NoModel(f"its weights cannot be read ({error}): fetch or copy them again.")


def _is_ignored(name: str, network: Any) -> bool:
    """Return True if a stored tensor without a parameter affects no result, by the rules of transformers."""
    patterns = {r"rotary_emb\.inv_freq", *(network._keys_to_ignore_on_load_unexpected or ())}
    is_tied_head = name == HEAD and network.lm_head.weight is network.model.embed_tokens.weight
    return is_tied_head or any(re.search(pattern, name) for pattern in patterns)


def _refuse_other_head(files: Mapping[str, Path]) -> None:
    """Raise NoModel if a tied model was stored with a head that differs from its embedding."""
    with safe_open(files[HEAD], "pt") as of_head, safe_open(files[EMBEDDING], "pt") as of_embedding:
        head, embedding = of_head.get_slice(HEAD), of_embedding.get_slice(EMBEDDING)
        if head.get_shape() != embedding.get_shape():
            raise untied()
        for start in range(0, head.get_shape()[0], _COMPARED_ROWS):
            rows = slice(start, start + _COMPARED_ROWS)
            if not torch.equal(head[rows], embedding[rows]):
                raise untied()


def _fill(parameter: torch.Tensor, stored: Any, name: str) -> None:
    """Copy this member's rows of a stored tensor, or all rows if the parameter is not divided."""
    if list(parameter.shape) != stored.get_shape():
        refuse_absent([name])
    if not isinstance(parameter, DTensor):
        parameter.copy_(stored[:])
        refuse_not_finite([(name, parameter)])
        return
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if shape[0]:
        own = parameter.to_local().copy_(stored[offset[0] : offset[0] + shape[0]])
        refuse_not_finite([(name, own)])


def own_bytes(base: BaseModel) -> int:
    """Return the bytes of this member's part of the base model, including the unembedding."""
    others = (each for each in base.backbone.parameters() if each is not base.head_weight)
    parts = (each.to_local() if isinstance(each, DTensor) else each for each in others)
    return base.head_weight.nbytes + sum(part.nbytes for part in parts)
