"""Read a base model from a folder or a hub; what is wrong with it is a sentence for the operator."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from cotrain_workers.engine.device import is_out_of_memory
from cotrain_workers.engine.progress import ReportedProgress

CONFIG = "config.json"
#: Where a model may lie below the folder that was named: among others, or in a hub's cache.
_BELOW = (f"*/{CONFIG}", f"snapshots/*/{CONFIG}")
_READ = {".json", ".safetensors", ".bin"}
_AGAIN = "fetch or copy them again"


class UnusableModel(Exception):
    """This base model cannot be served; the message says why, and what to do."""


class NoModel(UnusableModel, OSError):
    """There is no model there, or none that can be read."""


class ModelTooLarge(UnusableModel, ValueError):
    """The model takes more memory than there is."""


def read_config(model: str, refuse_type: Callable[[str], None], *, local_files_only: bool) -> Any:
    """Read the configuration of a hub id or a folder.

    `refuse_type` is asked before the library, which does not know every type. Raises NoModel, and what
    `refuse_type` does.
    """
    folder = Path(model)
    if folder.exists():
        _refuse_other_things(folder)
        _refuse_closed_files(folder)
    try:
        raw, _ = PreTrainedConfig.get_config_dict(model, local_files_only=local_files_only)
        kind = raw.get("model_type")
    except Exception as error:
        why = _why_not_fetched(error, local_files_only=local_files_only)
        raise NoModel(_unreadable(error) if folder.exists() else why) from error
    if not isinstance(kind, str):
        raise NoModel(f"its {CONFIG} is missing or has no model_type: give a language model.")
    refuse_type(kind)
    try:
        return AutoConfig.from_pretrained(
            model, local_files_only=local_files_only, trust_remote_code=False
        )
    except Exception as error:
        raise NoModel(_unreadable(error)) from error


def read_weights(model: str, *, dtype: torch.dtype, local_files_only: bool) -> Any:
    """Load the model into host memory.

    Raises:
        NoModel: weights are missing, torn, or of other shapes than the configuration says. The library
            would fill their places with random numbers.
        ModelTooLarge: there is not enough memory.
    """
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model,
            dtype=dtype,
            local_files_only=local_files_only,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below, by name
            tqdm_class=ReportedProgress,
        )
    except Exception as error:
        if is_out_of_memory(error):
            raise model_too_large() from error
        raise NoModel(f"its weights cannot be read ({_brief(error)}): {_AGAIN}.") from error
    network, found = loaded
    absent = sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])})
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise NoModel(
            f"its weights lack {absent[0]}{more}, at least in the shape that {CONFIG} says: {_AGAIN}."
        )
    return network


def model_too_large(needed_bytes: int = 0, free_bytes: int = 0) -> ModelTooLarge:
    """Say that memory is too small for a model; sizes in bytes, 0 where they are not known."""
    sizes = f" (its weights take {needed_bytes / 1e9:.1f} GB, {free_bytes / 1e9:.1f} GB are free)"
    return ModelTooLarge(
        f"there is not enough memory for it{sizes if needed_bytes else ''}: "
        "give a smaller model, or this host more memory."
    )


def _refuse_other_things(path: Path) -> None:
    """Raise NoModel for a file, and for a folder that holds something else than a model."""
    if not path.is_dir():
        raise NoModel(f"it is a file: give the folder of a model, which holds {CONFIG}.")
    if (path / CONFIG).exists():
        return
    if (path / "adapter_config.json").exists():
        raise NoModel(
            "it is a LoRA adapter: give the model that it was trained on, and bring the adapter with "
            "`cotrain upload`."
        )
    if any(path.glob("*.gguf")):
        raise NoModel(
            "it holds a GGUF file, which cannot be trained: give the model it was made from."
        )
    inside = next(_models_below(path), None)
    instead = f"did you mean {inside}?" if inside else "give the folder of a model, or a hub id."
    raise NoModel(f"the folder has no {CONFIG}: {instead}")


def _refuse_closed_files(folder: Path) -> None:
    """Raise NoModel for a file that this user may not read, of which the library says that it is not there."""
    files = (file for file in sorted(folder.iterdir()) if file.suffix in _READ)
    closed = [file.name for file in files if not os.access(file, os.R_OK)]
    if closed:
        raise NoModel(
            f"its {closed[0]} may not be read by user {os.geteuid()}, who runs this: `chmod a+r` it."
        )


def _models_below(folder: Path) -> Iterator[Path]:
    return (found.parent for pattern in _BELOW for found in sorted(folder.glob(pattern)))


def _why_not_fetched(error: BaseException, *, local_files_only: bool) -> str:
    causes = list(_causes(error))
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return "the hub asks who you are: accept the model's terms there, and set HF_TOKEN to a token of yours."
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return "the hub has no such model, or shows it only to those whose HF_TOKEN it knows: check the name."
    if any(isinstance(cause, HFValidationError) for cause in causes):
        return "there is no such folder, and a hub id looks like Qwen/Qwen3-0.6B: check the name."
    if local_files_only or constants.HF_HUB_OFFLINE:
        return (
            "there is no such folder, the cache of this host has no model of that name, and the hub is not "
            "to be asked (COTRAIN_OFFLINE, HF_HUB_OFFLINE): check the name, or fetch it first."
        )
    return (
        f"there is no such folder, and the hub does not answer ({_brief(causes[-1])}): check the name and "
        "the network."
    )


def _unreadable(error: BaseException) -> str:
    return f"its {CONFIG} cannot be read ({_brief(error)}): fetch or copy it again."


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _brief(error: BaseException) -> str:
    """Return the first line of a message, which may be a page long."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first.rstrip(".:")
