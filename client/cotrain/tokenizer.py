"""The tokenizer of a base model. No server hands it out: it is loaded as the hub names it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from cotrain.errors import TokenizerMissing

LLAMA_3 = "meta-llama/Llama-3"
# The same tokenizer where no licence must be accepted first.
LLAMA_3_MIRROR = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"


def load_tokenizer(base_model: str, tokenizer_id: str | None = None) -> Any:
    """Load a base model's tokenizer with transformers, from a folder or from the hub.

    Raises TokenizerMissing.
    """
    try:
        # By name: transformers is the caller's, this package does not depend on it.
        auto_tokenizer = import_module("transformers").AutoTokenizer
    except ModuleNotFoundError as error:
        raise TokenizerMissing("get_tokenizer needs: pip install transformers") from error
    name = tokenizer_id or tokenizer_name(base_model)
    try:
        return auto_tokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise TokenizerMissing(
            f"no tokenizer {name!r}, neither as a folder here nor on the hub; "
            "load the base model's tokenizer yourself"
        ) from error


def tokenizer_name(base_model: str) -> str:
    """Name the tokenizer of a base model; a folder is one as it stands.

    A suffix after `:` and the variant of `organisation/model/variant` name the same tokenizer.
    """
    if Path(base_model).is_dir():
        return base_model
    name = base_model.split(":")[0]
    if name.startswith(LLAMA_3):
        return LLAMA_3_MIRROR
    if name.count("/") == 2:
        return name.rpartition("/")[0]
    return name
