"""Retention rules, such as `last:3, best:eval/nll:2`, which decide the checkpoints that a run keeps."""

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cotrain.clients.checkpoints import delete_all
from cotrain.errors import APIError, UnsupportedInput
from cotrain.requests.background_loop import BackgroundLoop
from cotrain.requests.futures import Future, join_futures
from cotrain.transport.http import Transport
from cotrain.transport.responses import reader
from cotrain.wire.checkpoints import SaveWeightsResponse
from cotrain.wire.rest import Checkpoint, CheckpointsListResponse

log = logging.getLogger("cotrain")

RULE = re.compile(r"last:(?P<last>\d+)|(?P<kind>best|highest):(?P<metric>[^:,]+):(?P<count>\d+)")


@dataclass(frozen=True)
class Rule:
    """Number of checkpoints to keep: the newest, or those with the lowest or highest value of a metric."""

    count: int
    metric: str = ""
    """Empty: the newest checkpoints."""
    is_highest: bool = False

    def keeps(self, newest_first: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Return the kept ones. Checkpoints without the metric are not kept; of equal ones, the newest are."""
        if not self.metric:
            return list(newest_first[: self.count])
        sign = -1 if self.is_highest else 1
        with_value = [each for each in newest_first if self.metric in (each.metrics or {})]
        return sorted(with_value, key=lambda each: sign * (each.metrics or {})[self.metric])[: self.count]


def rules_of(text: str) -> list[Rule]:
    """Return the rules of a text. Raises UnsupportedInput, which names the part that is none."""
    rules = []
    for part in text.split(","):
        match = RULE.fullmatch(part.strip())
        count = int((match["last"] or match["count"]) if match else 0)
        if match is None or not count:
            raise UnsupportedInput(
                f"keep: {part.strip()!r} is no rule. Use last:N, best:METRIC:N (lowest values) or "
                "highest:METRIC:N with N from 1, separated by commas"
            )
        rules.append(Rule(count, (match["metric"] or "").strip(), match["kind"] == "highest"))
    return rules


def superfluous(checkpoints: Iterable[Checkpoint], rules: Sequence[Rule]) -> list[Checkpoint]:
    """Return the training checkpoints of one run that no rule keeps, newest first.

    The newest one is always kept, and so are published ones and those with an expiry.
    """
    newest_first = sorted(
        (each for each in checkpoints if each.checkpoint_type == "training"), key=lambda each: each.time, reverse=True
    )
    kept = {each.tinker_path for rule in rules for each in rule.keeps(newest_first)}
    return [
        each
        for each in newest_first[1:]
        if each.tinker_path not in kept and not each.public and each.expires_at is None
    ]


def then_prune(
    loop: BackgroundLoop, transport: Transport, run: str, saved: Future[SaveWeightsResponse], rules: Sequence[Rule]
) -> Future[SaveWeightsResponse]:
    """Return the future of a save that also deletes the superfluous checkpoints of its run."""

    async def finish() -> SaveWeightsResponse:
        answer = await saved
        try:
            found = await transport.get(f"training_runs/{run}/checkpoints", reader(CheckpointsListResponse))
            await delete_all(transport, [each.tinker_path for each in superfluous(found.checkpoints, rules)])
        except APIError as error:  # the checkpoint is saved, and the next save repeats this
            log.warning("older checkpoints of %s were not deleted: %s", run, error)
        return answer

    return join_futures(loop, [saved], finish(), what=f"a save of {run}")
