"""Files that nobody refers to (I5): what is written, and who refers to it, looked at from outside.

They are kept for a while, since a process may be about to refer to them. At the end of a trial a worker
that waits for nothing clears them away at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cotrain_store.keys import result_keys, run_keys, weights_keys
from cotrain_store.messages.ids import PoolId, RunId
from cotrain_store.redis_client.connection import SyncConnection

#: Names that Redis goes through per command. By its default, most work of a trial is that of those who look.
SCAN_COUNT = 1_000
#: Where what lies: how deep below the data folder files, or folders that are one thing, are.
PLACES = {
    "spool": "*",
    "snapshots": "*/*",
    "weights": "??/*",
    "optimizers": "??/*",
    "external": "*",
}


def leftovers(folder: Path, store: SyncConnection, pool: PoolId) -> list[str]:
    """List what nobody refers to, as paths below the data folder."""
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
    """Name what is referred to, as the place and the name there."""
    for log in store.scan_iter(f"{run_keys.log(pool, RunId(''))}*", SCAN_COUNT):
        files = store.hmget(log, ["snapfile", "oldfile"])
        yield from (("snapshots", file.decode()) for file in files if file)
    for count in (result_keys.spool_segment_refs(), result_keys.spool_results()):
        yield from (("spool", segment.decode()) for segment in store.hkeys(count))
    for weights in store.smembers(weights_keys.pool_weights(pool)):
        row = store.hmget(f"cotrain:weights:{weights.decode()}", ["digest", "optimizer"])
        for place, digest in zip(("weights", "optimizers"), row, strict=True):
            if digest:
                yield place, digest.decode()
    for external in store.smembers(weights_keys.external_folders(pool)):
        yield "external", external.decode()
