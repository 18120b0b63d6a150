"""Check of a base model's folder by the names of its files, before anything is loaded."""

import os
from pathlib import Path

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
WEIGHT_SUFFIXES = {".safetensors", ".bin"}
#: Beginnings of the names of a tokenizer's files.
_TOKENIZER = ("tokenizer", "vocab", "tekken", "sentencepiece", "spiece")
#: Locations of a model below the given folder: subfolders, and the cache of a hub.
_BELOW = (f"*/{CONFIG}", f"snapshots/*/{CONFIG}")


def why_not_served(source: str) -> str:
    """Return the reason why a folder holds no base model, with its remedy; "" for a model and for a hub id."""
    folder = Path(source)
    if not folder.exists():
        return ""
    if not folder.is_dir():
        return f"it is a file: give the folder of a model, which holds {CONFIG}."
    files = sorted(folder.iterdir())
    names, suffixes = {file.name for file in files}, {file.suffix for file in files}
    if CONFIG not in names:
        return _instead_of_model(folder, names, suffixes)
    if ADAPTER_CONFIG in names:  # the library would attach it, but only where PEFT is installed
        return (
            f"the folder holds an adapter as well ({ADAPTER_CONFIG}): move it out; bring the adapter "
            "with `cotrain upload`, if the model does not hold it already."
        )
    if not suffixes & WEIGHT_SUFFIXES:
        return "the folder has no weights (model.safetensors): fetch or copy them again."
    for file in files:  # the library would report a closed file as missing
        if file.suffix in WEIGHT_SUFFIXES | {".json"} and not os.access(file, os.R_OK):
            return f"its {file.name} may not be read by user {os.geteuid()}, who runs this: `chmod a+r` it."
    return ""


def has_tokenizer(source: str) -> bool:
    """Return False for a folder without a tokenizer, whose model trains tokens only."""
    folder = Path(source)
    return not folder.is_dir() or any(
        file.name.startswith(_TOKENIZER) or file.suffix == ".tiktoken" for file in folder.iterdir()
    )


def _instead_of_model(folder: Path, names: set[str], suffixes: set[str]) -> str:
    if ADAPTER_CONFIG in names:
        return (
            "it is a LoRA adapter: give the model that it was trained on, and bring the adapter with `cotrain upload`."
        )
    if ".gguf" in suffixes:
        return "it holds a GGUF file, which cannot be trained: give the model it was made from."
    inside = next((found.parent for pattern in _BELOW for found in sorted(folder.glob(pattern))), None)
    instead = f"did you mean {inside}?" if inside else "give the folder of a model, or a hub id."
    return f"the folder has no {CONFIG}: {instead}"
