"""LoRA adapters in GGUF, for `llama-server --lora` and other programs with llama.cpp.

The names are those of llama.cpp (package `gguf`). Its Llama computes rotary positions of neighbouring
values, and transformers of values half a head apart. So rows of B of `q_proj` and `k_proj` change
places in the Llama and Mistral families, as in the file of their base model.
"""

from pathlib import Path
from typing import Any

from cotrain.errors import ExportFailed
from cotrain.export.adapter import UNEMBED, Adapter
from cotrain.export.base import BaseFolder
from cotrain.export.libraries import library

FILE = "adapter.gguf"
#: `model_type` of transformers → architecture of llama.cpp.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
_SUFFIXES = (".lora_a", ".lora_b")


def refusal_of(base: BaseFolder, adapter: Adapter) -> str | None:
    """Return the reason why llama.cpp cannot apply an adapter, or None."""
    if base.family not in ARCHITECTURES:
        return (
            f"--gguf supports {', '.join(ARCHITECTURES)}, not {base.family!r}: export with --merged and convert the "
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
    writer = gguf.GGUFWriter(file, ARCHITECTURES[base.family])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_name(name)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, adapter.alpha)
    tensors = gguf_tensors(base, adapter)
    for tensor, values in tensors.items():
        writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = {each.name: each.data for each in gguf.GGUFReader(file).tensors}
    if found.keys() != tensors.keys() or any((found[name] != values).any() for name, values in tensors.items()):
        raise ExportFailed(f"{file.name} does not read as it was written")


def gguf_tensors(base: BaseFolder, adapter: Adapter) -> dict[str, Any]:
    """Return the float32 arrays of an adapter by llama.cpp's names: `<weight>.lora_a`, `<weight>.lora_b`."""
    gguf = library("gguf")
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    architecture = numbers[ARCHITECTURES[base.family]]
    names = gguf.get_tensor_name_map(architecture, int(base.settings.num_hidden_layers))
    settings = base.settings
    heads_of = {"q_proj": settings.num_attention_heads, "k_proj": settings.num_key_value_heads}
    tensors = {}
    for module, (a, b) in adapter.matrices.items():
        name = "output" if module == UNEMBED else names.get_name(module)
        if name is None:
            raise ExportFailed(f"llama.cpp has no name for {module} of {base.family}")
        short = module.rpartition(".")[2]
        if ARCHITECTURES[base.family] == "llama" and short in heads_of:
            b = interleaved(b, heads_of[short])
        for suffix, matrix in zip(_SUFFIXES, (a, b), strict=True):
            tensors[f"{name}.weight{suffix}"] = matrix.contiguous().numpy()
    return tensors


def interleaved(rows: Any, heads: int) -> Any:
    """Return rows `[heads * size, n]` with both halves of each head interleaved, the order of llama.cpp."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
