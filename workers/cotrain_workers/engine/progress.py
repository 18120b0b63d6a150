"""How far a start is, said to those who wait for it: a worker's log, and the terminal of `cotrain serve`."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from huggingface_hub.utils.tqdm import disable_progress_bars
from tqdm.std import tqdm
from transformers.utils import logging
from typing_extensions import override

#: What takes less is known from what follows it.
EVERY_S = 5.0

_listeners: list[Callable[[str], None]] = []


def listen(listener: Callable[[str], None]) -> None:
    """Report what is done from now on to `listener`; no library draws bars of its own any more."""
    _listeners.append(listener)
    disable_progress_bars()
    logging.set_tqdm_hook(lambda _, args, kwargs: ReportedProgress(*args, **kwargs))


def report(doing: str) -> None:
    """Say what begins now, or how far it is."""
    for listener in _listeners:
        listener(doing)


class ReportedProgress(tqdm):  # type: ignore[misc]  # it comes without types
    """Stands where a library would draw a progress bar, and reports one line every EVERY_S."""

    monitor_interval = 0  # no thread

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        quiet = {"file": io.StringIO(), "mininterval": EVERY_S, "leave": False, "disable": False}
        super().__init__(*args, **{**kwargs, **quiet})

    @override
    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Report how far it is; nothing at its beginning and at its end."""
        if msg is None and self.total and 0 < self.n < self.total:
            report(f"{self.desc or 'fetching'}: {self.n / self.total:.0%}")
        return True
