"""Whole API in this process, on a real Redis, with a pool that a worker once published."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from json import dumps
from pathlib import Path
from typing import Any

import httpx
from starlette.types import Message

from cotrain_server.app import create_app
from cotrain_server.services import Services
from cotrain_server.settings import ServerSettings
from cotrain_store import redis_keys
from cotrain_store.disk.spool import Spool, new_writer
from cotrain_store.messages.ids import PoolId, RunId, WorkerId
from cotrain_store.messages.runs import PoolRecord
from cotrain_store.oplog.execution import Execution
from cotrain_store.redis_client.connection import open_sync_connection

ALICE = "tml-alice_secret-of-alice"
BOB = "tml-bob_secret-of-bob"
ADMIN_KEY = "key-of-the-operator"
OPERATOR = {"X-API-Key": ADMIN_KEY}
SOON_S = 30.0
"""Time in seconds within which a released poll ends. A forgotten poll is held for 40 s in these tests."""
POOL = PoolRecord(
    id=PoolId("p-tiny"),
    base_model="tiny/model",
    architecture="qwen3",
    vocab_size=512,
    context_length=64,
    max_rank=128,
    num_parameters=1000,
    device="cpu",
    dtype="float32",
    numerics_id="test",
    tokens_per_s=1000.0,
    eos_token_ids=(0,),
    tokenizer="p-tiny",
    max_sequence_tokens=64,
    sampler="engine",
    lora_widths={"attn": 40, "mlp": 40, "unembed": 20},
)


class Api:
    """Client of the API, with the services behind it."""

    def __init__(self, http: httpx.AsyncClient, services: Services, app: Any) -> None:
        self.http = http
        self.services = services
        self.app = app

    async def post(self, path: str, json: Any = None, key: str = ALICE, **kwargs: Any) -> httpx.Response:
        headers = {"X-API-Key": key, **kwargs.pop("headers", {})}
        return await self.http.post(f"/api/v1/{path}", json=json, headers=headers, **kwargs)

    async def get(self, path: str, key: str = ALICE) -> httpx.Response:
        return await self.http.get(f"/api/v1/{path}", headers={"X-API-Key": key})

    def start_post(self, path: str, json: Any) -> tuple[asyncio.Task[None], asyncio.Event]:
        """Send a POST as a client that disconnects without an answer once the event is set."""
        hung_up = asyncio.Event()
        messages: list[Message] = [{"type": "http.request", "body": dumps(json).encode()}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await hung_up.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            pass

        headers = {"x-api-key": ALICE, "content-type": "application/json"}
        scope = {
            "type": "http",
            "method": "POST",
            "path": f"/api/v1/{path}",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
        }
        return asyncio.create_task(self.app(scope, receive, send)), hung_up

    async def until_held(self, *polls: asyncio.Task[Any]) -> None:
        """Wait until these polls are waiting for their results."""
        while self.services.futures.waiters != len(polls):
            assert not any(poll.done() for poll in polls)
            await asyncio.sleep(0)

    async def until_batch_held(self, *polls: asyncio.Task[Any]) -> None:
        """Wait until these batch polls, and no other polls, are held."""
        while self.services.polls_by_tenant.total() != len(polls):
            assert not any(poll.done() for poll in polls)
            await asyncio.sleep(0)

    async def new_run(self, key: str = ALICE, **lora: Any) -> RunId:
        """Open a session and a run of rank 4. Return the run's id."""
        session = (await self.post("create_session", {}, key)).json()["session_id"]
        body = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": POOL.base_model,
            "lora_config": {"rank": 4, **lora},
        }
        answer = await self.post("create_model", body, key)
        assert answer.status_code == 200, answer.text
        return RunId(answer.json()["model_id"])

    async def new_sampler(self, key: str = ALICE) -> str:
        """Open a session and a sampler of the base model. Return the sampler's id."""
        session = (await self.post("create_session", {}, key)).json()["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": POOL.base_model}
        answer = await self.post("create_sampling_session", body, key)
        assert answer.status_code == 200, answer.text
        sampler: str = answer.json()["sampling_session_id"]
        return sampler


def pass_body(run: str, seq: int, tokens: list[int] | None = None, **changes: Any) -> Mapping[str, Any]:
    """Return a valid forward_backward request of SDK 0.22. `changes` are fields of its input."""
    tokens = tokens or [1, 2, 3]
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "loss_fn_inputs": {
            "target_tokens": {"dtype": "int64", "data": tokens},
            "weights": {"dtype": "float32", "data": [1.0] * len(tokens)},
        },
    }
    content = {"data": [datum], "loss_fn": "cross_entropy", **changes}
    return {"model_id": run, "seq_id": seq, "forward_backward_input": content}


def sample_body(sampler: str, seq: int, **changes: Any) -> dict[str, Any]:
    """Return a valid asample request of SDKs."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    whole = {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "num_samples": 1,
        "prompt": prompt,
        "sampling_params": {"max_tokens": 4},
        "prompt_logprobs": False,
        "type": "sample",
    }
    return {**whole, **changes}


@asynccontextmanager
async def running_api(redis_url: str, address: str = "127.0.0.1", **changes: Any) -> AsyncIterator[Api]:
    """Run the API; requests come from `address`."""
    folder = Path(tempfile.mkdtemp(prefix="cotrain-api-"))
    long_poll_s: float = changes.pop("long_poll_s", 0.2)
    settings = ServerSettings(
        redis_url=redis_url,
        data_dir=folder,
        api_keys=(ALICE, BOB),
        disk_reserve_bytes=0,
        **{"admin_key": ADMIN_KEY, **changes},
    )
    publish_pool(redis_url, folder)
    app = create_app(settings, long_poll_s)
    transport = httpx.ASGITransport(app, client=(address, 12345))
    http = httpx.AsyncClient(transport=transport, base_url="http://localhost")
    try:
        async with app.router.lifespan_context(app), http:
            await listening(app.state.services)
            yield Api(http, app.state.services, app)
    finally:
        shutil.rmtree(folder)


async def listening(services: Services) -> None:
    """Wait until this process is subscribed to results."""
    channel = redis_keys.notify_results()
    while True:
        if (await services.connection.pubsub_numsub(channel))[0][1]:
            return
        await asyncio.sleep(0.005)


def publish_pool(redis_url: str, folder: Path) -> None:
    """Publish the pool as its worker does at its start."""
    spool = Spool(folder / "spool", new_writer("test"))
    connection = open_sync_connection(redis_url)
    execution = Execution(connection, spool, spool, POOL.id, WorkerId("w0"))
    execution.claim()
    execution.publish(POOL)
    spool.close()
    connection.close()
