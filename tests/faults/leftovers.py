"""Unreferenced files (I5), found by comparing the files with all references.

The server keeps such files for a while, since a process may be about to refer to them. At the end
of a trial a worker without that delay deletes them at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cotrain_store import redis_keys
from cotrain_store.messages.ids import PoolId, RunId
from cotrain_store.redis_client.connection import SyncConnection

#: Names that Redis scans per command. With its default, most work of a trial would be these scans.
SCAN_COUNT = 1_000
#: Depth below the data folder of files, or of folders that are one object, by kind.
PLACES = {"spool": "*", "snapshots": "*/*", "weights": "??/*", "optimizers": "??/*", "external": "*"}


def leftovers(folder: Path, store: SyncConnection, pool: PoolId) -> list[str]:
    """List unreferenced files, as paths below the data folder."""
    wanted = set(_wanted(store, pool))
    found = ((path.relative_to(folder), path.stem) for path in _written(folder))
    return sorted(
        str(path)
        for path, stem in found
        if {(path.parts[0], name) for name in (stem, path.name, "/".join(path.parts[1:]))}.isdisjoint(wanted)
    )  # fmt: skip


def _written(folder: Path) -> list[Path]:
    return [path for place, pattern in PLACES.items() for path in (folder / place).glob(pattern)]


def _wanted(store: SyncConnection, pool: PoolId) -> Iterable[tuple[str, str]]:
    """Yield the referenced files, as kind and name."""
    for log in store.scan_iter(f"{redis_keys.log(pool, RunId(''))}*", SCAN_COUNT):
        files = store.hmget(log, ["snapfile", "oldfile"])
        yield from (("snapshots", file.decode()) for file in files if file)
    for count in (redis_keys.spool_segment_refs(), redis_keys.spool_results()):
        yield from (("spool", segment.decode()) for segment in store.hkeys(count))
    for weights in store.smembers(redis_keys.pool_weights(pool)):
        row = store.hmget(f"cotrain:weights:{weights.decode()}", ["digest", "optimizer"])
        for place, digest in zip(("weights", "optimizers"), row, strict=True):
            if digest:
                yield place, digest.decode()
    for external in store.smembers(redis_keys.external_folders(pool)):
        yield "external", external.decode()
