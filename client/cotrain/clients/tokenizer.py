"""Tokenizer of a base model: the server's, or the hub's if the server provides none."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import httpx

from cotrain.errors import BadRequestError, NotFoundError, TokenizerMissing
from cotrain.requests.connection import Connection
from cotrain.transport.responses import reader
from cotrain.wire.runs import TOKENIZER_FILES, TokenizerResponse

LLAMA_3 = "meta-llama/Llama-3"
# The same tokenizer without a licence to accept first.
LLAMA_3_MIRROR = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"

HUB_PATIENCE_S = 5.0


def load_tokenizer(connection: Connection, base_model: str) -> Any:
    """Load a base model's tokenizer with transformers: from the server, else from a folder or the hub.

    Raises TokenizerMissing, or APIError.
    """
    try:
        # Imported by name, because this package does not depend on transformers.
        auto_tokenizer = import_module("transformers").AutoTokenizer
    except ModuleNotFoundError as error:
        raise TokenizerMissing("get_tokenizer needs: pip install transformers") from error
    files = connection.loop.run(_server_files(connection, base_model))
    if files:
        return _from_files(auto_tokenizer, files)
    name = tokenizer_name(base_model)
    unreachable = None if Path(name).is_dir() else _hub_error()
    try:
        # The server chose this name, so code in that repository must neither run nor prompt the user.
        found = auto_tokenizer.from_pretrained(name, local_files_only=unreachable is not None, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _missing(name, unreachable) from error
    # transformers makes a tokenizer without a vocabulary if there is only a config.json.
    if not found.encode("a", add_special_tokens=False):
        raise _missing(name, unreachable)
    return found


def _missing(name: str, unreachable: str | None) -> TokenizerMissing:
    hub = "on the hub" if unreachable is None else f"in the hub's cache (the hub cannot be reached: {unreachable})"
    return TokenizerMissing(
        f"no tokenizer {name!r}, neither at the server, as a folder here nor {hub}; "
        "load the base model's tokenizer yourself: only token ids travel"
    )


def tokenizer_name(base_model: str) -> str:
    """Return the name of a base model's tokenizer; a folder is used unchanged.

    A suffix after `:` and the variant in `organisation/model/variant` are ignored.
    """
    if Path(base_model).is_dir():
        return base_model
    name = base_model.split(":")[0]
    if name.startswith(LLAMA_3):
        return LLAMA_3_MIRROR
    if name.count("/") == 2:
        return name.rpartition("/")[0]
    return name


def _hub_error() -> str | None:
    """Return the error if the hub is unreachable, or None. transformers would retry for a minute."""
    try:
        httpx.head(import_module("huggingface_hub.constants").ENDPOINT, timeout=HUB_PATIENCE_S)
    except httpx.TransportError as error:
        return str(error) or type(error).__name__
    return None


async def _server_files(connection: Connection, base_model: str) -> Mapping[str, str]:
    """Fetch the server's files; {} if it has none, or not this base model, or not this endpoint."""
    try:
        path = f"tokenizers?base_model={quote(base_model, safe='')}"
        return (await connection.transport.get(path, reader(TokenizerResponse))).files
    except (BadRequestError, NotFoundError):
        return {}


def _from_files(auto_tokenizer: Any, files: Mapping[str, str]) -> Any:
    with TemporaryDirectory(prefix="cotrain-tokenizer-") as folder:
        for name in TOKENIZER_FILES:
            if name in files:
                (Path(folder) / name).write_text(files[name], encoding="utf-8")
        try:
            return auto_tokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # a file of another version: its parsers raise bare Exceptions
            raise TokenizerMissing(
                f"the transformers installed here cannot read the server's tokenizer: {error!r}"
            ) from error
