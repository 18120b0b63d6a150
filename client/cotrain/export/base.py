"""The base model's files on this machine: its configuration, and the position of each weight. Needs the extra `export`."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from cotrain.errors import ExportFailed, LibraryMissing

CONFIG = "config.json"
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
#: Path of the text in a model with a vision tower, as transformers names it, and as many files do.
_TEXT, _TEXT_ON_DISK = "model.language_model.", "language_model."
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
#: Names of one weight for all experts of a layer.
_FUSED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
_GRANITE = {"gate_proj": "input_linear", "up_proj": "input_linear", "down_proj": "output_linear"}
_EXPERT = re.compile(r"(?P<block>.+)\.experts\.(?P<number>\d+)\.(?P<last>\w+)")
#: Names in safetensors → names in torch, the coarsest first.
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
#: Endings of the files besides weights that a model needs: configuration and tokenizer.
_OTHER_FILES = (".json", ".txt", ".model", ".jinja")


@dataclass(frozen=True)
class BaseFolder:
    """A model's folder with weights in safetensors."""

    path: Path
    config: Mapping[str, Any]
    """Content of its `config.json`."""
    settings: Any
    """The same as transformers reads it, with the defaults of its family."""
    files: Mapping[str, tuple[str, ...]]
    """Names of the weights in each file."""
    dtype: str
    """Type of its weights, as torch names it."""

    @property
    def family(self) -> str:
        """`model_type` of transformers, such as qwen3."""
        return str(self.settings.model_type)

    @property
    def is_tied(self) -> bool:
        """True if the unembedding is the embedding's matrix."""
        return bool(self.settings.tie_word_embeddings)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self.settings.get_text_config().vocab_size)

    @property
    def embedding(self) -> str:
        """Return the name of the embedding's weight in the files, such as `model.embed_tokens.weight`."""
        names = [name for file in self.files.values() for name in file if name.endswith(_EMBEDDING)]
        return min(names, key=len)

    @property
    def head(self) -> str:
        """Return the name of the unembedding's weight in the files, if they have one."""
        is_inside = self.embedding.startswith(_TEXT_ON_DISK)
        return f"{_TEXT_ON_DISK}{_HEAD}" if is_inside else _HEAD

    def names_on_disk(self, module: str) -> list[str]:
        """Return the names that a module's weight may have in the files.

        An expert has a weight of its own, or all experts of a layer have one. Names differ for experts of Mixtral's
        kind, and often in a model with a vision tower.
        """
        if module == _HEAD.removesuffix(".weight"):
            return [self.head]
        path = self._path_on_disk(module)
        expert = _EXPERT.fullmatch(path)
        if expert is None:
            return [f"{path}.weight"]
        block, last = expert["block"], expert["last"]
        if self.family in ("mixtral", "minimax_m2", "phimoe", "lfm2_moe"):
            block = block.replace(".mlp", ".block_sparse_moe")
            return [f"{block}.experts.{expert['number']}.{_MIXTRAL[last]}.weight"]
        if self.family in ("granitemoe", "granitemoehybrid"):
            return [f"{block}.{_GRANITE[last]}.weight"]
        return [f"{path}.weight", f"{block}.experts.{_FUSED[last]}"]

    def _path_on_disk(self, module: str) -> str:
        inside = module.removeprefix(_TEXT)
        path = self.embedding.removesuffix(_EMBEDDING) if inside != module else ""
        return f"{path}{inside}"

    @property
    def size(self) -> int:
        """Bytes of all weights."""
        return sum((self.path / name).stat().st_size for name in self.files)

    def other_files(self) -> list[Path]:
        """Return the files of the tokenizer and of the settings for generation."""
        return [
            file
            for file in sorted(self.path.iterdir())
            if file.suffix in _OTHER_FILES
            and file.name != CONFIG
            and not file.name.endswith(".index.json")
            and not file.name.startswith(("adapter_", "LICENSE", "README"))
        ]


def find_base(name: str) -> BaseFolder:
    """Return a model's folder by its path, or by its name on the hub, which downloads it or uses the cache.

    Raises ExportFailed if it cannot be found, is quantized, or has no weights in safetensors.
    """
    path = Path(name)
    if not path.is_dir():
        path = _from_hub(name)
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        settings = library("transformers").AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ExportFailed(f"base: {path} has no readable {CONFIG}: {error}") from error
    if config.get("quantization_config"):
        raise ExportFailed(f"base: {path} is quantized; give the 16- or 32-bit model")
    open_file = library("safetensors").safe_open
    files, dtypes = {}, set()
    for file in sorted(path.glob("model*.safetensors")):
        with open_file(file, "pt") as opened:
            files[file.name] = tuple(opened.keys())
            dtypes |= {str(opened.get_slice(name).get_dtype()) for name in files[file.name]}
    has_embedding = any(name.endswith(_EMBEDDING) for names in files.values() for name in names)
    if not dtypes <= _DTYPES.keys() or not has_embedding:
        raise ExportFailed(f"base: {path} has no model*.safetensors with weights of 16 or 32 bits; convert them")
    return BaseFolder(path, config, settings, files, _DTYPES[min(dtypes, key=list(_DTYPES).index)])


def _from_hub(name: str) -> Path:
    hub = library("huggingface_hub")
    try:
        found = hub.snapshot_download(name, allow_patterns=["*.safetensors", *(f"*{end}" for end in _OTHER_FILES)])
    except (OSError, ValueError) as error:
        raise ExportFailed(
            f"base: {name!r} is no folder here, and neither in the hub's cache nor on the hub; pass the "
            "base model's folder (--base FOLDER)"
        ) from error
    return Path(found)


def library(name: str) -> Any:
    """Import a library of the extra `export` by its name. Raises LibraryMissing with the command that installs it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise LibraryMissing(
            f"cotrain export needs {error.name}: pip install -c constraints.txt '.[export]'"
        ) from error
