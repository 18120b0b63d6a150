"""The least HTTP client that can load a server: one request at a time on a kept connection.

Clients share two cores with the server; a whole client library would measure itself.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import Any

from bench.load.null_worker import TOKENS_PER_OP
from cotrain.wire.proto import wire_pb2

#: Statuses that SDKs repeat without a word to their user, as they do when a connection breaks.
REPEATED = (408, 429, 503)
RETRY_S = 0.05


class Dropped(Exception):
    """The connection ended before the answer was whole."""


class Client:
    """One connection of one tenant; opened on use, and again after it was closed."""

    def __init__(self, address: tuple[str, int], key: str) -> None:
        self._address = address
        self._key = key
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(
        self, path: str, body: dict[str, Any] | bytes, tail: bytes = b""
    ) -> tuple[int, dict[str, Any] | bytes]:
        """POST JSON, or protobuf whose end may be in `tail`; return status and answer. Raises Dropped."""
        payload, kind = (body, "x-protobuf") if isinstance(body, bytes) else (json.dumps(body).encode(), "json")
        size = len(payload) + len(tail)
        head = (
            f"POST /api/v1/{path} HTTP/1.1\r\nhost: bench\r\nx-api-key: {self._key}\r\n"
            f"accept: application/x-protobuf, application/json\r\n"
            f"content-type: application/{kind}\r\ncontent-length: {size}\r\n\r\n"
        )
        try:
            reader, writer = await self._open()
            writer.write(head.encode() + payload)
            writer.write(tail)
            return await self._answer(reader)
        except (OSError, asyncio.IncompleteReadError) as error:
            self.close()
            raise Dropped(repr(error)) from error

    def close(self) -> None:
        if self._streams:
            self._streams[1].close()
            self._streams = None

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams and self._streams[0].at_eof():
            self.close()  # the server has closed it while nothing was asked
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address, limit=2**14)
        return self._streams

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[int, dict[str, Any] | bytes]:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        status = int(head.split(" ", 2)[1])
        length = int(head.split("content-length:")[1].split("\r\n")[0])
        payload = await reader.readexactly(length)
        if "connection: close" in head:
            self.close()
        return status, json.loads(payload) if "application/json" in head else payload


async def persist(
    client: Client, path: str, body: dict[str, Any] | bytes, seen: Counter[str], tail: bytes = b""
) -> Any:
    """Ask as SDKs do: again after what they repeat silently. Anything else but 200 is a failure."""
    while True:
        try:
            status, answer = await client.post(path, body, tail)
        except Dropped:
            seen[f"{path} dropped"] += 1
            await asyncio.sleep(RETRY_S)
            continue
        seen[f"{path} {status}"] += 1
        if status == 200:
            return answer
        if status not in REPEATED:
            raise AssertionError(f"{path}: {status} {answer!r}")
        await asyncio.sleep(0 if status == 408 else RETRY_S)


async def new_run(client: Client, seen: Counter[str]) -> str:
    """Open a session and a run, whose creation is accepted and maybe not done."""
    session = (await persist(client, "create_session", {}, seen))["session_id"]
    body = {
        "session_id": session, "model_seq_id": 0, "base_model": "null", "lora_config": {"rank": 4},
    }  # fmt: skip
    run: str = (await persist(client, "create_model", body, seen))["model_id"]
    return run


async def answered(address: tuple[str, int], key: str, request: str, seen: Counter[str]) -> tuple[str, float]:
    """Wait for a result on a connection of its own; return the request and the time of arrival."""
    client = Client(address, key)
    await persist(client, "retrieve_future", {"request_id": request}, seen)
    client.close()
    return request, time.time()


async def trained(client: Client, run: str, seq: int, seen: Counter[str]) -> None:
    """Send one forward_backward and wait for its result."""
    body = pass_body(run, seq, TOKENS_PER_OP)
    request = (await persist(client, "forward_backward", body, seen))["request_id"]
    await persist(client, "retrieve_future", {"request_id": request}, seen)


def pass_body(run: str, seq: int, tokens: int) -> bytes:
    """Write a forward_backward of one datum, as SDK 0.38 does."""
    request = wire_pb2.ForwardBackwardRequest(model_id=run, seq_id=seq, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = bytes(4 * tokens)
    targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
    targets.dtype, targets.dense = wire_pb2.DTYPE_INT64, bytes(8 * tokens)
    weights.dtype, weights.dense = wire_pb2.DTYPE_FLOAT32, bytes(4 * tokens)
    return request.SerializeToString()
