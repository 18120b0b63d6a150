"""Results as they are stored: small ones in Redis, large ones in the spool with a reference in Redis.

The constants are the results that the store itself gives to requests of ended runs, and to cancelled sample requests.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from cotrain_store import redis_keys
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES, Spool
from cotrain_store.messages.ops import Result, ResultKind

#: Result of requests of a run that was closed before they were planned.
UNLOADED = Result.failed("The training run was unloaded before this request ran.", "user")
#: Result of requests of a run that could not be restored after a crash.
RUN_STOPPED = Result.failed(
    "The training run was stopped: its log could not be replayed to the stored results.", "server"
)
#: Result of a request that its client cancelled.
CANCELLED = Result.failed("Cancelled by the client.", "user")
#: The same as an argument of the scripts.
CANCEL = {
    "result": CANCELLED.encode().decode(),
    "ttl_ms": redis_keys.SMALL_RESULT_TTL_MS,
    "size": len(CANCELLED.payload),
}
#: In ms: the time that the record of an ended request outlives its result, and the time that its end stays published.
TTL_MS = {"record": redis_keys.SAMPLE_RECORD_EXTRA_MS, "published": redis_keys.COMPLETION_TTL_MS}
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
            (Result(_SPOOLED[result.kind], puts[index].result().encode()).encode(), redis_keys.LARGE_RESULT_TTL_MS)
            if index in puts
            else (result.encode(), redis_keys.SMALL_RESULT_TTL_MS)
            for index, result in enumerate(results)
        ]
    finally:
        if puts:
            spool.settle(put.result() for put in puts.values() if not put.exception())


def store_results(
    results: Sequence[Result], spool: Spool, store: Callable[[Sequence[tuple[bytes, int]]], bytes]
) -> bytes:
    """Call `store` with results encoded by `encoded_results`, and return the script's answer.

    If the files were removed first, because this process was suspended for long, repeat with new files.
    """
    while True:
        with encoded_results(results, spool) as encoded:
            answer = store(encoded)
        if answer != b"SWEPT":
            return answer


def is_spooled(result: Result) -> bool:
    """Return True if a result's payload is on disk."""
    return result.kind in _WHOLE


def whole_result(result: Result, spool: Spool) -> Result:
    """Return a spooled result with its payload; raises SpoolCorrupt if it is missing."""
    return Result(_WHOLE[result.kind], spool.read(result.payload.decode()))
