"""Progress of a start, for a worker's log and the terminal of `cotrain serve`."""

import io
from collections.abc import Callable
from typing import Any

from huggingface_hub.utils.tqdm import disable_progress_bars
from tqdm.std import tqdm
from transformers.utils import logging
from typing_extensions import override

#: Interval in s of progress reports. Shorter phases are reported only by the next one.
EVERY_S = 5.0

_listeners: list[Callable[[str], None]] = []


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
