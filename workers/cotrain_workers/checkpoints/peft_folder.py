"""PEFT folders of adapters, named by content. A write is atomic, and a read verifies the content.

A folder `<digest[:2]>/<digest>/` holds `adapter_model.safetensors` (fp32, PEFT's names),
`adapter_config.json` and SHA256SUMS. Plain PEFT, vLLM and merge tools can read it unchanged. The config is
written last and deleted first, so a folder with a config is complete.

The unembedding is `lm_head`, even if it is tied to the embeddings. A tied one cannot be merged, because
one matrix would change both, and the cookbook's tools refuse. Under the cookbook's own name for it, the
tools would merge it all the same (logits of a tiny model off by 4). Their conversion for serving loses it.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.numpy import save  # takes half the time of the one for tensors
from safetensors.torch import load

from cotrain_store.blobs.folder import passes
from cotrain_store.blobs.protocol import Blobs
from cotrain_store.disk.checksums import REMEDY, SUMS, fault_of, read_sums, sums_of
from cotrain_store.failpoints import failpoint
from cotrain_workers.engine.adapters.peft_import import (
    DOWN,
    GATE_UP,
    of_parameter,
    parameter_names,
    parameter_shapes,
    shared,
    stacked,
)
from cotrain_workers.engine.ops import HostWeights
from cotrain_workers.engine.spec import AdapterSpec, Layout, Target

LayoutOf = Callable[[AdapterSpec], Layout]

FORMAT = "cotrain-adapter-1"
TENSORS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
#: Maximum bytes of a header that are read: a damaged file may declare any length.
MAX_HEADER_BYTES = 1 << 20
#: Path of the text in a model with a vision tower. PEFT would adapt equal names in the tower too.
_TEXT, _TOWERS = "model.language_model.", r"model\.(?!language_model\.).*"
#: Keys of the config that change a reader's results; the others are informative.
_DECISIVE = (
    "peft_type", "r", "lora_alpha", "target_modules", "target_parameters", "rank_pattern", "alpha_pattern",
    "use_rslora", "use_dora",
)  # fmt: skip


class FolderUnreadable(Exception):
    """The folder of an adapter is missing, incomplete, or does not match its name."""


class SumsUnusable(FolderUnreadable):
    """The SHA256SUMS of an adapter is missing, incomplete or wrong. Its text may be shown to the tenant."""


@dataclass(frozen=True)
class Written:
    """Durable adapter or optimizer state: the digest that names it, its key, and the bytes of its files."""

    digest: str
    key: str
    size: int


def digest(spec: AdapterSpec, base_model: str, flat: torch.Tensor) -> str:
    """Return the SHA-256 (hex) of an adapter's spec, its base model's name and its arena's fp32 bytes."""
    header = json.dumps([FORMAT, base_model, spec.stored()], sort_keys=True)
    hasher = hashlib.sha256(header.encode() + b"\0")
    hasher.update(flat.numpy().astype("<f4", copy=False).data)
    return hasher.hexdigest()


def key_of(digest: str) -> str:
    """Return the key of an adapter, written or not."""
    return f"{digest[:2]}/{digest}"


def write_folder(root: Blobs, weights: HostWeights, layout: Layout, base_model: str) -> Written:
    """Write an adapter. On return it is durable under its name and has a new timestamp. Raises OSError.

    Idempotent, also for two processes at once, because equal content has one name. A damaged folder of that
    name is replaced.
    """
    name = digest(weights.spec, base_model, weights.flat)
    key, contents = key_of(name), _contents(weights, layout, base_model, name)
    if not (_is_whole(root, name, layout) and root.touch(f"{key}/{CONFIG}")):
        root.delete(f"{key}/{CONFIG}")
        root.put(f"{key}/{TENSORS}", contents[TENSORS])
        failpoint("weights.half_written")
        root.put(f"{key}/{SUMS}", contents[SUMS])
        failpoint("weights.before_rename")
        root.put(f"{key}/{CONFIG}", contents[CONFIG])
        failpoint("weights.renamed")
    return Written(name, key, sum(map(len, contents.values())))


def read_folder(root: Blobs, name: str, layout_of: LayoutOf) -> HostWeights:
    """Return the adapter of a digest, bit-identical to the one written.

    `layout_of` returns the arena layout of a spec on this base model.

    Raises:
        FolderUnreadable: a file is missing or incomplete, or its tensors do not match the folder's
            name or its spec on this base model.
        SumsUnusable: SHA256SUMS is missing, incomplete or wrong.
        OSError: this process cannot read anything now.
    """
    try:
        config_content = root.get(f"{key_of(name)}/{CONFIG}")
        config = json.loads(config_content)
        content = root.get(f"{key_of(name)}/{TENSORS}")
        header = metadata_of(content)
        spec, base_model = AdapterSpec(**json.loads(header["spec"])), header["base_model"]
        layout = layout_of(spec)
        flat = _arena(load(content), layout)
        sums = _sums(root, name)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as broken:
        if passes(broken):
            raise
        raise FolderUnreadable(f"Adapter {name} cannot be read: {broken!r}.") from broken
    if not digest(spec, base_model, flat) == header["sha256"] == name:
        raise FolderUnreadable(f"Adapter {name} holds other weights than its name says.")
    expected = adapter_config(spec, layout, base_model)
    if any(config.get(key) != expected.get(key) for key in _DECISIVE):
        raise FolderUnreadable(f"Adapter {name} has another {CONFIG} than was written.")
    if fault := fault_of(sums, (CONFIG, TENSORS)):
        raise SumsUnusable(f"{fault}. {REMEDY}")
    # The folder's name already verifies the tensors. Hashing them again would double the time of a load.
    if sums and sums[CONFIG] != hashlib.sha256(config_content).hexdigest():
        raise SumsUnusable(f"{CONFIG} is not the one of {SUMS}. {REMEDY}")
    return HostWeights(spec, flat)


def remove_folder(root: Blobs, digest: str) -> None:
    """Delete an adapter, its config first, so that no incomplete folder has one. Idempotent. Raises OSError."""
    for name in (CONFIG, SUMS, TENSORS):
        root.delete(f"{key_of(digest)}/{name}")


def adapter_config(spec: AdapterSpec, layout: Layout, base_model: str) -> dict[str, object]:
    """Return the content of `adapter_config.json`. The stored matrices are not scaled by `alpha / r`."""
    experts = layout.gate_by_experts
    whole = [f"{module}.{each}" for module in experts for each in (GATE_UP, DOWN)]
    parameters = {".".join(each.rsplit(".", 2)[1:]) for each in whole}
    modules = {each.name.rsplit(".", 1)[-1]: each.family for each in _plain(layout)}
    if experts:
        # PEFT takes the name of a shared expert's module for that of the experts, so its weight is named instead.
        parameters |= {f"{name}.weight" for name, family in modules.items() if family == "mlp"}
        modules = {name: family for name, family in modules.items() if family != "mlp"}
    alpha = int(spec.alpha) if spec.alpha.is_integer() else spec.alpha
    inside = any(target.name.startswith(_TEXT) for target in layout.targets)
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": spec.rank,
        "lora_alpha": alpha,
        "target_modules": sorted(modules),
        "rank_pattern": {each: 2 * spec.rank for each in sorted(parameters) if GATE_UP in each},
        "alpha_pattern": {each: 2 * alpha for each in sorted(parameters) if GATE_UP in each},
        "modules_to_save": None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "auto_mapping": None,
        **({"exclude_modules": _TOWERS} if inside else {}),
    }
    return config | ({"target_parameters": sorted(parameters)} if experts else {})


def tensor_names(module: str) -> tuple[str, str]:
    """Return PEFT's names of a module's A `[rank, inputs]` and B `[outputs, rank]`."""
    return tuple(f"base_model.model.{module}.lora_{letter}.weight" for letter in "AB")  # type: ignore[return-value]


def _contents(weights: HostWeights, layout: Layout, base_model: str, name: str) -> dict[str, bytes]:
    header = {
        "format": "pt",  # transformers and vLLM require it
        "cotrain": FORMAT,
        "spec": json.dumps(weights.spec.stored()),
        "base_model": base_model,
        "sha256": name,
    }
    if layout.gate_by_experts:
        # The same matrices for each expert would look like ones of its own.
        header["experts"] = "per_expert" if weights.spec.per_expert else "shared_outer"
    tensors = {}
    views = layout.views(weights.flat)
    plain = ((tensor_names(each.name), views[each.name]) for each in _plain(layout))
    for (name_a, name_b), (a, b) in (*plain, *stacked(layout, views)):
        tensors[name_a], tensors[name_b] = a.contiguous().numpy(), b.contiguous().numpy()
    config = json.dumps(adapter_config(weights.spec, layout, base_model), indent=2)
    contents = {TENSORS: _sorted(save(tensors, header)), CONFIG: f"{config}\n".encode()}
    # For the API, which sends the files and cannot compute their digest.
    return contents | {SUMS: sums_of(contents).encode()}


def _sorted(content: bytes) -> bytes:
    """Return a safetensors file with its metadata sorted.

    The library writes metadata in arbitrary order. If two processes write one adapter at once, the tensors of
    one may stand next to the SHA256SUMS of the other, so both must write equal bytes.
    """
    start = 8 + int.from_bytes(content[:8], "little")
    fields = json.loads(content[8:start])
    metadata = dict(sorted(fields.pop("__metadata__").items()))
    header = json.dumps({"__metadata__": metadata, **fields}, separators=(",", ":"), ensure_ascii=False).encode()
    # The header keeps its length, so that the tensors stay aligned.
    return b"".join((content[:8], header.ljust(start - 8), content[start:]))


def _sums(root: Blobs, name: str) -> dict[str, str] | None:
    try:
        return read_sums(root.get(f"{key_of(name)}/{SUMS}"))
    except FileNotFoundError:
        return None


def _is_whole(root: Blobs, name: str, layout: Layout) -> bool:
    try:
        read_folder(root, name, lambda _: layout)
    except FolderUnreadable:
        return False
    return True


def _arena(tensors: Mapping[str, torch.Tensor], layout: Layout) -> torch.Tensor:
    """Return an arena filled with tensors. Raise ValueError unless they match the layout exactly."""
    flat = torch.zeros(layout.size)
    left, views = dict(tensors), layout.views(flat)

    def take(names: tuple[str, str], shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
        found = [left.pop(name) for name in names]
        for name, tensor, shape in zip(names, found, shapes, strict=True):
            if tensor.shape != shape or tensor.dtype != torch.float32:
                raise ValueError(f"{name} is {tensor.dtype} of shape {list(tensor.shape)}")
        return found

    for target in _plain(layout):
        pair = views[target.name]
        for ours, theirs in zip(pair, take(tensor_names(target.name), [each.shape for each in pair]), strict=True):
            ours.copy_(theirs)
    for module, target in layout.gate_by_experts.items():
        for parameter in (GATE_UP, DOWN):
            shapes = parameter_shapes(parameter, layout.rank, target)
            a, b = take(parameter_names(module, parameter), shapes)
            for name, pair in of_parameter(parameter, a, b, target, in_halves=True).items():
                for ours, theirs in zip(views[f"{module}.{name}"], pair, strict=True):
                    ours.copy_(shared(theirs, len(ours)))
    if left:
        raise ValueError(f"unexpected tensors, {min(left)} first")
    return flat


def _plain(layout: Layout) -> list[Target]:
    """Return the linear modules of a layout."""
    return [target for target in layout.targets if not target.experts]


def metadata_of(content: bytes) -> dict[str, str]:
    """Return the metadata of a safetensors file. Raises ValueError or KeyError."""
    length = int.from_bytes(content[:8], "little")
    metadata: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
    return metadata


def read_metadata(root: Blobs, key: str) -> dict[str, str]:
    """Read the metadata of a safetensors file alone. Raises OSError, ValueError or KeyError."""
    head = root.get(key, (0, 8))
    length = min(int.from_bytes(head, "little"), MAX_HEADER_BYTES)
    return metadata_of(head + root.get(key, (8, 8 + length)))
