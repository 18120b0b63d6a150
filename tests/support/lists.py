"""Steps of tests of lists: save something, and read the list."""

from __future__ import annotations

from itertools import count
from typing import Any

from cotrain_store.messages.ids import RunId
from tests.support.http_api import ALICE, Api
from tests.support.stand_in import StandIn


async def got(api: Api, path: str, key: str = ALICE) -> Any:
    """Return the answer to a GET, which must succeed."""
    answer = await api.get(path, key)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def save(api: Api, worker: StandIn, run: str, *names: str, call: str = "save_weights") -> None:
    """Save a run under these names, as its next requests."""
    position = worker.execution.logs.position(RunId(run))
    first = 1 if position is None else position.done + 1
    for seq, name in zip(count(max(first, 1)), names, strict=False):
        body = {"model_id": run, "seq_id": seq, "path": name}
        assert (await api.post(call, body)).status_code == 200
    await worker.run_log()
