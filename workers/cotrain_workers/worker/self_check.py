"""Self-check of a live worker at the operator's request, between two steps."""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import structlog

from cotrain_store.oplog.execution import Execution
from cotrain_workers.engine.cycle import Yielding
from cotrain_workers.engine.trainer import Trainer
from cotrain_workers.engine.training.mix_check import MixCheck, check_mix

log = structlog.get_logger()


class SelfCheck:
    """Requests for self-checks of this worker, and the result of the last one for its heartbeat."""

    def __init__(self, engine: Trainer, execution: Execution) -> None:
        self._engine = engine
        self._execution = execution
        self.last: dict[str, Any] | None = None
        """Result of the last check in this process: `asked_at`, `at`, `took_s`, `ok` and the fields of MixCheck."""

    def go_on(self, run: Callable[[Yielding[MixCheck]], MixCheck]) -> bool:
        """Run a requested check by `run`, and return True if there was one.

        The request is removed first, so that a check that crashes the process does not run again. Raises
        DeviceLost if it left the device unable to compute.
        """
        asked_at = self._execution.take_self_check()
        if asked_at is None:
            return False
        began = time.monotonic()
        facts = self._engine.facts
        try:
            found = run(
                check_mix(
                    self._engine.cycle, self._engine.adapters, facts.numerics.dtype,
                    exact=facts.numerics.device == "cpu", vocab=facts.vocab_size, max_rank=facts.max_rank,
                )
            )  # fmt: skip
        except Exception as error:  # the check must not stop the worker, only report
            log.exception("self_check_failed")
            self._engine.check_device()
            found = MixCheck(0, 0, 0.0, 0.0, 0.0, 0.0, f"The check failed: {error}")
        self.last = {
            "asked_at": asked_at, "at": time.time(), "took_s": round(time.monotonic() - began, 3),
            "ok": not found.problem, **asdict(found),
        }  # fmt: skip
        log.info("self_check", **self.last)
        return True
