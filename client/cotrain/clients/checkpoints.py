"""Checkpoints of an account: their URLs, transfers, and the rules that decide which ones a run keeps."""

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx

from cotrain.clients.run_results import joined
from cotrain.errors import APIError, MalformedMessage, NotFoundError, UnsupportedInput
from cotrain.requests.connection import BackgroundLoop, wait_for_result
from cotrain.requests.futures import Future
from cotrain.transport.http import Transport, url_of
from cotrain.transport.responses import reader
from cotrain.wire.checkpoints import (
    CheckpointArchiveUrlResponse,
    ExternalWeightsUrlsResponse,
    ParsedCheckpointTinkerPath,
    SaveWeightsResponse,
)
from cotrain.wire.rest import Checkpoint, CheckpointsListResponse
from cotrain.wire.runs import InterpolateRequest, InterpolateResponse, UntypedAPIFuture

log = logging.getLogger("cotrain")

Progress = Callable[[int, int], None]
"""Receives the bytes transferred and the total, 0 if unknown."""

PAGE = 100
#: File names that a server may write: the folder may contain other files of the caller.
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.(?:json|safetensors|age)")
#: A link that expired longer ago than this is rejected, so that a login page is never saved as an archive.
#: The clocks of client and server may differ by less.
CLOCKS_DIFFER = timedelta(days=1)
RULE = re.compile(r"last:(?P<last>\d+)|(?P<kind>best|highest):(?P<metric>[^:,]+):(?P<count>\d+)")


async def list_all(transport: Transport) -> list[Checkpoint]:
    """Return every checkpoint of the account, newest first. Raises APIError."""
    checkpoints: list[Checkpoint] = []
    while True:
        query = f"checkpoints?limit={PAGE}&offset={len(checkpoints)}"
        page = await transport.get(query, reader(CheckpointsListResponse))
        checkpoints += page.checkpoints
        if not page.checkpoints or not page.cursor or len(checkpoints) >= page.cursor.total_count:
            return checkpoints


async def download(transport: Transport, path: str, folder: Path, progress: Progress | None) -> list[str]:
    """Download a checkpoint's files to a folder, each one atomically; returns their names.

    Raises OSError or APIError.
    """
    where = f"{checkpoint_url(path)}/external_weights_urls"
    urls = (await transport.get(where, reader(ExternalWeightsUrlsResponse))).urls
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    names = sorted(urls)  # the small configuration first, because links expire soon
    for name in names:
        if not FILE.fullmatch(name):
            raise MalformedMessage(f"{name!r} is no name of a checkpoint's file")
    sizes = [await transport.size_of(urls[name]) for name in names] if progress else []
    for i, name in enumerate(names):
        of_file = progress and _part_of_all(progress, sizes, i)
        await transport.fetch(urls[name], folder / name, of_file)
    return names


def interpolate(loop: BackgroundLoop, transport: Transport, request: InterpolateRequest) -> Future[InterpolateResponse]:
    """Send an interpolation at once; the future is accepted when the server has queued it."""

    async def submit() -> str:
        path = "mint/checkpoints/interpolate"
        return (await transport.post(path, request, reader(UntypedAPIFuture))).request_id

    accepted = loop.start(submit())

    async def finish() -> InterpolateResponse:
        request_id = await asyncio.shield(asyncio.wrap_future(accepted))
        return await wait_for_result(transport, request_id, InterpolateResponse)

    return Future(accepted, loop.start(finish()), what="an interpolation of checkpoints")


def checkpoint_url(tinker_path: str) -> str:
    """Return the URL path of a checkpoint. Raises ValueError if `tinker_path` is malformed."""
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    return url_of("training_runs", parsed.training_run_id, "checkpoints", *parsed.checkpoint_id.split("/"))


async def archive_url(transport: Transport, checkpoint: str) -> CheckpointArchiveUrlResponse:
    """Return the URL of the tar of a checkpoint; the server sends it as a redirect."""
    return await transport.get(f"{checkpoint}/archive", _archive_link)


def _part_of_all(progress: Progress, sizes: Sequence[int], i: int) -> Progress:
    """Report the bytes of file `i` as a part of all files; the total is 0 if any size is unknown."""
    total = sum(sizes) if all(sizes) else 0
    return lambda done, _: progress(sum(sizes[:i]) + done, total)


def _archive_link(response: httpx.Response) -> CheckpointArchiveUrlResponse:
    """Parse a redirect to an archive. Raises MalformedMessage for a redirect to a login page."""
    try:
        expires = parsedate_to_datetime(response.headers["Expires"])
        link = CheckpointArchiveUrlResponse(url=response.headers["Location"], expires=expires)
    except (KeyError, ValueError) as error:
        raise MalformedMessage(f"{response.url} did not answer where the archive is") from error
    if expires < datetime.now(UTC) - CLOCKS_DIFFER:
        raise MalformedMessage(f"{response.url} did not answer where the archive is")
    return link


# ---- Retention rules, such as `last:3, best:eval/nll:2` -------------------------------------------


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


async def delete_all(transport: Transport, paths: Sequence[str]) -> list[str]:
    """Delete checkpoints, one after the other; return the paths of those that existed. Raises APIError."""
    urls = {path: checkpoint_url(path) for path in paths}  # a malformed path deletes nothing
    deleted = []
    for path, url in urls.items():
        try:
            await transport.delete(url)
        except NotFoundError:
            continue  # another process deleted it, or it has expired
        deleted.append(path)
    return deleted


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

    return joined(loop, [saved], finish(), what=f"a save of {run}")
