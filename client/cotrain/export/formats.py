"""Files of an export: a merged model for transformers, a LoRA adapter for llama.cpp, and a model card."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cotrain.errors import ExportFailed
from cotrain.export.adapter import UNEMBED, Adapter
from cotrain.export.base import CONFIG, BaseFolder, library

GGUF_FILE = "adapter.gguf"
_INDEX = "model.safetensors.index.json"
#: `model_type` of transformers → architecture of llama.cpp.
_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
_SUFFIXES = (".lora_a", ".lora_b")


def unties(base: BaseFolder, adapter: Adapter) -> bool:
    """Return True if the merged model needs an unembedding that the base model does not have."""
    return base.is_tied and adapter.trains_unembedding


def write_merged(
    base: BaseFolder, adapter: Adapter, folder: Path, dtype: str | None, progress: Callable[[int, int], None]
) -> None:
    """Write the merged model to an empty folder, in the base model's dtype or in `dtype`.

    Files are converted one after the other, so memory holds one of them. Where embeddings are tied and the adapter
    changes the unembedding, the merged model gets an unembedding of its own. Otherwise the change would also move
    the embeddings. Sums are computed in float32 and rounded once. Raises ExportFailed if the base model lacks a module of
    the adapter, or has it in another shape.
    """
    safetensors = library("safetensors")
    save = library("safetensors.torch").save_file
    torch_dtype = getattr(library("torch"), dtype) if dtype else None
    modules_by_weight: dict[str, list[str]] = {}
    for module in adapter.matrices:
        for name in base.names_on_disk(module):
            modules_by_weight.setdefault(name, []).append(module)
    unmerged, done, total = set(adapter.matrices), 0, base.size
    file_by_weight: dict[str, str] = {}
    for file, names in base.files.items():
        tensors: dict[str, Any] = {}
        with safetensors.safe_open(base.path / file, "pt") as opened:
            for name in names:
                if name == base.head and base.is_tied:
                    continue  # a copy of the embedding, which transformers ignores
                weight = opened.get_tensor(name)
                if name == base.embedding and unties(base, adapter):
                    tensors[base.head] = _plus(base, adapter, [UNEMBED], weight, torch_dtype)
                    unmerged.discard(UNEMBED)
                modules = modules_by_weight.get(name, [])
                if modules and unmerged.issuperset(modules):
                    weight = _plus(base, adapter, modules, weight, torch_dtype)
                    unmerged.difference_update(modules)
                tensors[name] = weight.to(torch_dtype) if torch_dtype else weight
        save(tensors, folder / file, {"format": "pt"})
        file_by_weight |= dict.fromkeys(tensors, file)
        done += (base.path / file).stat().st_size
        progress(done, total)
    if unmerged:
        raise ExportFailed(
            f"base: {base.path} has no weight of {min(unmerged)}, which the adapter changes: it is another "
            "model than the run's"
        )
    if len(base.files) > 1 or (base.path / _INDEX).exists():
        size = sum((folder / file).stat().st_size for file in base.files)
        _write_json(folder / _INDEX, {"metadata": {"total_size": size}, "weight_map": file_by_weight})
    _write_json(folder / CONFIG, _merged_config(base, adapter, dtype))
    for other in base.other_files():
        shutil.copyfile(other, folder / other.name)


def _merged_config(base: BaseFolder, adapter: Adapter, dtype: str | None) -> dict[str, Any]:
    config = dict(base.config)
    if unties(base, adapter):
        config["tie_word_embeddings"] = False
        if "text_config" in config:
            config["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    if dtype:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    return config


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2), encoding="utf-8")


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


# ---- GGUF, for `llama-server --lora` and other programs with llama.cpp --------------------------------


def refusal_of(base: BaseFolder, adapter: Adapter) -> str | None:
    """Return the reason why llama.cpp cannot apply an adapter, or None."""
    if base.family not in _ARCHITECTURES:
        return (
            f"--gguf supports {', '.join(_ARCHITECTURES)}, not {base.family!r}: export with --merged and convert the "
            "folder with llama.cpp's convert_hf_to_gguf.py"
        )
    if adapter.trains_unembedding and base.is_tied:
        return (
            "llama.cpp has no unembedding to adapt where embeddings are tied. Export with --merged and "
            "convert the folder with llama.cpp's convert_hf_to_gguf.py (not for Gemma, which llama.cpp "
            "always ties), or pass --leave-out-unembed, or train with train_unembed=False"
        )
    return None


def write_gguf(base: BaseFolder, adapter: Adapter, file: Path, name: str) -> None:
    """Write a GGUF adapter in float32 and compare the values of a reader with it.

    Raises ExportFailed if a value differs.
    """
    gguf = library("gguf")
    writer = gguf.GGUFWriter(file, _ARCHITECTURES[base.family])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_name(name)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, adapter.alpha)
    tensors = _gguf_tensors(base, adapter)
    for tensor, values in tensors.items():
        writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = {each.name: each.data for each in gguf.GGUFReader(file).tensors}
    if found.keys() != tensors.keys() or any((found[name] != values).any() for name, values in tensors.items()):
        raise ExportFailed(f"{file.name} does not read as it was written")


def _gguf_tensors(base: BaseFolder, adapter: Adapter) -> dict[str, Any]:
    """Return the float32 arrays of an adapter by llama.cpp's names: `<weight>.lora_a`, `<weight>.lora_b`."""
    gguf = library("gguf")
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    architecture = numbers[_ARCHITECTURES[base.family]]
    names = gguf.get_tensor_name_map(architecture, int(base.settings.num_hidden_layers))
    settings = base.settings
    heads_of = {"q_proj": settings.num_attention_heads, "k_proj": settings.num_key_value_heads}
    tensors = {}
    for module, (a, b) in adapter.matrices.items():
        name = "output" if module == UNEMBED else names.get_name(module)
        if name is None:
            raise ExportFailed(f"llama.cpp has no name for {module} of {base.family}")
        short = module.rpartition(".")[2]
        if _ARCHITECTURES[base.family] == "llama" and short in heads_of:
            b = _interleaved(b, heads_of[short])
        for suffix, matrix in zip(_SUFFIXES, (a, b), strict=True):
            tensors[f"{name}.weight{suffix}"] = matrix.contiguous().numpy()
    return tensors


def _interleaved(rows: Any, heads: int) -> Any:
    """Return rows `[heads * size, n]` with both halves of each head interleaved, the order of llama.cpp.

    Its Llama computes rotary positions of neighbouring values, and transformers of values half a head apart. So rows
    of B of `q_proj` and `k_proj` change places in the Llama and Mistral families, as in the file of their base model.
    """
    return rows.reshape(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


# ---- Model card --------------------------------------------------------------------------------------

_LOAD = {
    "merged": """from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("FOLDER")""",
    "adapter": """from peft import PeftModel
from transformers import AutoModelForCausalLM
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("BASE"), "FOLDER")""",
    "tinker": """from tinker_cookbook.weights import build_hf_model
build_hf_model(base_model="BASE", adapter_path="FOLDER", output_path="merged")""",
    "gguf": """llama-server --model BASE.gguf --lora FOLDER/adapter.gguf""",
}


def card(kind: str, path: str, base: BaseFolder, base_model: str, adapter: Adapter, notes: Sequence[str]) -> str:
    """Return the text of the card. `kind` is merged, adapter, tinker or gguf; `notes` are sentences."""
    reader = {"merged": "transformers", "adapter": "peft", "gguf": "gguf", "tinker": "peft"}[kind]
    targets = ", ".join(sorted({name.rpartition(".")[2] for name in adapter.matrices}))
    load = _LOAD[kind].replace("BASE", base_model)
    language = "sh" if kind == "gguf" else "python"
    head = f"library_name: {reader}\nbase_model: {json.dumps(base_model)}\ntags: [lora, cotrain]"
    relation = "merge" if kind == "merged" else "adapter"
    facts = "\n".join(f"* {note}" for note in notes)
    return f"""---
{head}
base_model_relation: {relation}
---

# {path.rpartition("/")[2]}

LoRA of rank {adapter.rank}, alpha {adapter.alpha:g}, on {targets} of {base_model} ({base.family}).
Trained with cotrain; checkpoint `{path}`.

{facts}

```{language}
{load}
```

The licence of the base model applies.
"""
