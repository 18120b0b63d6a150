"""Results as Redis values: small ones whole, large ones as a reference into the spool."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from cotrain_store import redis_keys
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES, Spool
from cotrain_store.messages.results import Result, ResultKind

#: Result of requests of a run that was closed before they were planned.
UNLOADED = Result.failed("The training run was unloaded before this request ran.", "user")
#: Result of requests of a run that could not be restored after a crash.
RUN_STOPPED = Result.failed(
    "The training run was stopped: its log could not be replayed to the stored results.", "server"
)

_SPOOLED = {
    ResultKind.JSON: ResultKind.SPOOLED_JSON,
    ResultKind.PASS: ResultKind.SPOOLED_PASS,
    ResultKind.SAMPLE: ResultKind.SPOOLED_SAMPLE,
}
_WHOLE = {spooled: whole for whole, spooled in _SPOOLED.items()}


@contextmanager
def encoded_results(results: Sequence[Result], spool: Spool) -> Iterator[Sequence[tuple[bytes, int]]]:
    """Encode results for Redis, each with its lifetime in ms; large ones are on disk afterwards.

    Their files are kept at least until the block ends, which must store the references to them.
    """
    puts = {
        index: spool.put(result.payload)  # all of them share one fsync
        for index, result in enumerate(results)
        if result.kind in _SPOOLED and len(result.payload) > INLINE_LIMIT_BYTES
    }
    try:
        yield [
            _large(result, puts[index].result()) if index in puts else _small(result)
            for index, result in enumerate(results)
        ]
    finally:
        if puts:
            spool.settle(put.result() for put in puts.values() if not put.exception())


def stored_results(
    results: Sequence[Result], spool: Spool, store: Callable[[Sequence[tuple[bytes, int]]], bytes]
) -> bytes:
    """Call `store` with results encoded by `encoded_results`, and return the script's answer.

    If the files were removed first, because this process was suspended for long, repeat with new
    files.
    """
    while True:
        with encoded_results(results, spool) as encoded:
            answer = store(encoded)
        if answer != b"SWEPT":
            return answer


def _small(result: Result) -> tuple[bytes, int]:
    return result.encode(), redis_keys.SMALL_RESULT_TTL_MS


def _large(result: Result, ref: str) -> tuple[bytes, int]:
    return Result(_SPOOLED[result.kind], ref.encode()).encode(), redis_keys.LARGE_RESULT_TTL_MS


def is_spooled(result: Result) -> bool:
    """Return True if a result's payload is on disk."""
    return result.kind in _WHOLE


def whole_result(result: Result, spool: Spool) -> Result:
    """Return a spooled result with its payload; raises SpoolCorrupt if it is missing."""
    return Result(_WHOLE[result.kind], spool.read(result.payload.decode()))
