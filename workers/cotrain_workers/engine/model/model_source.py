"""Reader of a base model from a folder or hub, and the progress of a start.

Each fault becomes a sentence for the operator. Progress goes to a worker's log and the terminal of `cotrain serve`.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import disable_progress_bars
from tqdm.std import tqdm
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging
from transformers.utils.peft_utils import find_adapter_config_file
from typing_extensions import override

from cotrain_workers.engine.device import is_out_of_memory

CONFIG = "config.json"
#: Several times the depth of the deepest models. For many more, lists in the library would use up all memory.
MAX_LAYERS = 2048
_AGAIN = "fetch or copy them again"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
#: Interval in s of progress reports. Shorter phases are reported only by the next one.
EVERY_S = 5.0
_listeners: list[Callable[[str], None]] = []


class UnusableModel(Exception):
    """The base model cannot be served; the message contains reason and remedy."""


class NoModel(UnusableModel, OSError):
    """There is no readable model at this location."""


class ModelTooLarge(UnusableModel, ValueError):
    """The model needs more memory than is free."""


def read_config(model: str, refuse_type: Callable[[str], None], *, local_files_only: bool) -> Any:
    """Return the configuration of a hub id or a folder.

    `refuse_type` is called before the library, which does not support every type. Raises NoModel and the
    exceptions of `refuse_type`.
    """
    try:
        raw, _ = PreTrainedConfig.get_config_dict(model, local_files_only=local_files_only)
        kind = raw.get("model_type")
    except Exception as error:
        why = _why_not_fetched(error, local_files_only=local_files_only)
        raise NoModel(_unreadable(error) if Path(model).exists() else why) from error
    if not isinstance(kind, str):
        raise NoModel(f"its {CONFIG} is missing or has no model_type: give a language model.")
    refuse_type(kind)
    text = raw.get("text_config")
    layers = (text if isinstance(text, dict) else raw).get("num_hidden_layers")
    if isinstance(layers, int | float) and layers > MAX_LAYERS:
        raise unfit_config(f"num_hidden_layers must be at most {MAX_LAYERS}, not {layers}")
    try:
        config = AutoConfig.from_pretrained(model, local_files_only=local_files_only, trust_remote_code=False)
        adapter = find_adapter_config_file(model, local_files_only=local_files_only)
    except Exception as error:
        raise NoModel(_unreadable(error)) from error
    if adapter is not None:  # the library would attach it, but only where PEFT is installed
        raise NoModel(
            "it holds an adapter as well (adapter_config.json): give the model without it; bring the adapter "
            "with `cotrain upload`, if the model does not hold it already."
        )
    return config


def read_weights(model: str, reader: Any, *, dtype: torch.dtype, local_files_only: bool) -> Any:
    """Return the model, loaded into host memory by `reader`, a class of transformers.

    Raises:
        NoModel: weights are missing, truncated, unused, or their shapes differ from the configuration.
            The library would replace missing weights by random numbers and ignore unused ones.
        ModelTooLarge: there is not enough memory.
    """
    try:
        loaded: Any = reader.from_pretrained(
            model,
            dtype=dtype,
            local_files_only=local_files_only,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            tqdm_class=ReportedProgress,
        )
    except Exception as error:
        if is_out_of_memory(error):
            raise model_too_large() from error
        raise NoModel(f"its weights cannot be read ({_brief(error)}): {_AGAIN}.") from error
    network, found = loaded
    refuse_absent({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])})
    refuse_unused(found["unexpected_keys"])
    if network.config.tie_word_embeddings and network.lm_head.weight is not (network.get_input_embeddings().weight):
        raise untied()
    return network


def refuse_absent(absent: Iterable[str]) -> None:
    """Raise NoModel for parameters that are missing from the files, or have another shape there."""
    names = sorted(absent)
    if names == [HEAD]:
        raise NoModel(
            f"its weights lack {HEAD}: if it shares the embedding's, set tie_word_embeddings to true in {CONFIG}."
        )
    if names:
        raise NoModel(f"its weights lack {_first_of(names)}, at least in the shape that {CONFIG} says: {_AGAIN}.")


def refuse_unused(unused: Iterable[str]) -> None:
    """Raise NoModel for tensors of the files that the configured model does not use."""
    if names := sorted(unused):
        raise NoModel(
            f"its weights hold {_first_of(names)}, which the model of its {CONFIG} has no place for, so "
            f"its results would differ from those of the files: correct {CONFIG} (attention_bias, "
            "mlp_bias, num_hidden_layers)."
        )


def untied() -> NoModel:
    """Return the error for a checkpoint with two matrices where its configuration ties them to one."""
    return NoModel(
        f"its weights hold {HEAD} with other values than {EMBEDDING}, but {CONFIG} ties the two: set "
        f"tie_word_embeddings to false in {CONFIG}."
    )


def refuse_not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise NoModel for a tensor with NaN or infinity, which makes each result of the model NaN."""
    for name, tensor in tensors:
        if not tensor.numel() or not tensor.is_floating_point() or tensor.itemsize == 1:
            continue
        low, high = tensor.aminmax()  # NaN propagates to both; `isfinite` would need a copy
        if bool(torch.isfinite(low) & torch.isfinite(high)):
            continue
        if name.endswith("inv_freq"):
            raise unfit_config("the frequencies of its RoPE are not finite")
        raise NoModel(f"its weights are not finite: {name} holds NaN or infinity: {_AGAIN}.")


def unfit_config(reason: str) -> NoModel:
    """Return the error for an invalid configuration, with the first line of `reason`."""
    return NoModel(f"its {CONFIG} describes no model ({_first_line(reason)}): correct it.")


def model_too_large(needed_bytes: int = 0, free_bytes: int = 0, device: str = "cpu") -> ModelTooLarge:
    """Return the error for a model that exceeds the memory of a device; sizes in bytes, 0 if unknown."""
    if device != "cpu":
        return ModelTooLarge(
            "there is not enough memory on the GPU for it: give a smaller model, set COTRAIN_QUANTIZATION, or use several "
            "GPUs (--group-size)."
        )
    sizes = f" (its weights take {needed_bytes / 1e9:.1f} GB, {free_bytes / 1e9:.1f} GB are free)"
    return ModelTooLarge(
        f"there is not enough memory for it{sizes if needed_bytes else ''}: "
        "give a smaller model, or this host more memory."
    )


def listen(listener: Callable[[str], None]) -> None:
    """Report progress from now on to `listener`, and disable the progress bars of libraries."""
    _listeners.append(listener)
    disable_progress_bars()
    logging.set_tqdm_hook(lambda _, args, kwargs: ReportedProgress(*args, **kwargs))


def report(doing: str) -> None:
    """Report the current phase and its progress."""
    for listener in _listeners:
        listener(doing)


class ReportedProgress(tqdm):  # type: ignore[misc]  # it comes without types
    """Replacement of a library's progress bar that reports one line every EVERY_S."""

    monitor_interval = 0  # no thread

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        quiet = {"file": io.StringIO(), "mininterval": EVERY_S, "leave": False, "disable": False}
        super().__init__(*args, **{**kwargs, **quiet})

    @override
    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Report the progress; nothing at the beginning and at the end."""
        if msg is None and self.total and 0 < self.n < self.total:
            report(f"{self.desc or 'fetching'}: {self.n / self.total:.0%}")
        return True


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
        f"there is no such folder, and the hub does not answer ({_brief(causes[-1])}): check the name and the network."
    )


def _unreadable(error: BaseException) -> str:
    return f"its {CONFIG} cannot be read ({_brief(error)}): fetch or copy it again."


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_of(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _brief(error: BaseException) -> str:
    """Return the first line of a message, which may be very long."""
    return _first_line(str(error).strip() or type(error).__name__)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0].rstrip(".:")
