"""Attacks of a hostile neighbour: `ATTACKS` by name. Each is `async def attack(address, key)`, and runs until its end.

The argument `address` is a server's base URL (`http://127.0.0.1:8000`), `key` an API key of the attacker. Responses are
read and ignored, because a rejection is no obstacle to an attacker. Request bodies have functions of their own, for
tests of their cost.

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

import httpx
import zstandard

from cotrain.wire.proto import wire_pb2

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


def tiny_datums_body(run: str, datums: int = 65_536, last: bytes = b"") -> bytes:
    """Return zstd of a pass with the maximum number of one-token datums: 1 to 4 s to check, in 2 KB."""
    head = wire_pb2.ForwardBackwardRequest(model_id=run, seq_id=1)
    tail = wire_pb2.ForwardBackwardRequest(loss_fn="cross_entropy")
    many = _tiny_datum() * datums + last
    return zstandard.compress(head.SerializeToString() + many + tail.SerializeToString())


def _tiny_datum(token: int = 0) -> bytes:
    made = wire_pb2.ForwardBackwardRequest()
    datum = made.data.add()
    datum.model_input.add().encoded_text.tokens = token.to_bytes(4, "little")
    types = {"target_tokens": wire_pb2.DTYPE_INT32, "weights": wire_pb2.DTYPE_FLOAT32}
    for name, dtype in types.items():
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype, tensor.dense = dtype, bytes(4)
        tensor.shape.append(1)
    return made.SerializeToString()


def wrong_numbers_body(count: int = 4_000_000) -> bytes:
    """Return zstd of a prompt with four million values, each wrong in four ways."""
    prompt = b"1.5," * (count - 1) + b"1.5"
    return zstandard.compress(b'{"model": "m", "prompt": [' + prompt + b"]}")


# ---- Much work for one request ----------------------------------------------------------------------


async def long_text_body(http: httpx.AsyncClient, characters: int = 10_000_000) -> bytes:
    """Return a prompt of ten million characters."""
    text = "It was a bright cold day in April. " * (characters // 35)
    return json.dumps({"model": await _model(http), "prompt": text, "max_tokens": 1}).encode()


async def big_retrieve_body(http: httpx.AsyncClient) -> bytes:
    """Return a poll that acknowledges 100,000 nonexistent results of a new sampler."""
    made = await _created(http, "create_sampling_session", sampling_session_seq_id=0)
    sampler = made["sampling_session_id"]
    ids = [f"{sampler}:{seq}" for seq in range(IDS_PER_RETRIEVE)]
    target = {"type": "sampling_session", "sampling_session_id": sampler}
    return json.dumps({"target": target, "timeout": 0.0, "retrieved_request_ids": ids}).encode()


async def tiny_datums_of_a_run(http: httpx.AsyncClient) -> bytes:
    """Return a pass of a new run with the maximum number of datums."""
    return tiny_datums_body(await _new_run(http))


async def wrong_last_datum_of_a_run(http: httpx.AsyncClient) -> bytes:
    """Return the same with a token outside of the vocabulary at its end, so that it costs a parser and no worker."""
    return tiny_datums_body(await _new_run(http), 65_535, last=_tiny_datum(token=2**31 - 1))


async def _new_run(http: httpx.AsyncClient) -> str:
    run: str = (await _created(http, "create_model", model_seq_id=0, lora_config={"rank": 8}))["model_id"]
    return run


# ---- Sending --------------------------------------------------------------------------------------


def posting(
    path: str, headers: Mapping[str, str], body: Callable[[httpx.AsyncClient], Any], at_once: int = AT_ONCE
) -> Attack:  # fmt: skip
    """Return an attack that posts one body repeatedly, `at_once` at a time, each on a connection of its own."""

    async def attack(address: str, key: str) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        network = httpx.AsyncHTTPTransport(limits=limits, local_address=os.environ.get(ATTACKER_ADDRESS))
        own = {"X-API-Key": key, "Connection": "close"}
        async with httpx.AsyncClient(base_url=address, headers=own, transport=network, timeout=None) as http:
            made = body(http)
            sent = made if isinstance(made, bytes) else await made

            async def again_and_again() -> None:
                while True:
                    try:
                        await http.post(path, content=sent, headers=headers)
                    except httpx.HTTPError:
                        await asyncio.sleep(0.1)  # the server has closed the connection

            await asyncio.gather(*(again_and_again() for _ in range(at_once)))

    return attack


def holding(next_bytes: Callable[[int, str], bytes], every_s: float = 5.0) -> Attack:
    """Return an attack that opens MANY connections, and writes the next bytes on each every `every_s`.

    `next_bytes` receives the number of the write on this connection, and the API key. Closed connections are opened again.
    """

    async def attack(address: str, key: str) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        opening, url = asyncio.Semaphore(BURST), urlsplit(address)
        source = os.environ.get(ATTACKER_ADDRESS)
        local = (source, 0) if source else None

        async def one() -> None:
            while True:
                with suppress(OSError):
                    async with opening:
                        reader, writer = await asyncio.open_connection(url.hostname, url.port or 80, local_addr=local)
                    try:
                        await trickle(reader, writer)
                    finally:
                        writer.close()
                await asyncio.sleep(0.2)

        async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for sent in itertools.count():
                writer.write(next_bytes(sent, key))
                with suppress(TimeoutError):
                    async with asyncio.timeout(every_s):
                        while await reader.read(4096):
                            pass
                        return  # closed by the server

        await asyncio.gather(*(one() for _ in range(min(MANY, most - 500))))

    return attack


async def _created(http: httpx.AsyncClient, path: str, **wanted: object) -> dict[str, Any]:
    """Create a session, and a run or a sampler of it on the server's first base model."""
    session = (await http.post("/api/v1/create_session", json={})).json()["session_id"]
    body = {"session_id": session, "base_model": await _model(http), **wanted}
    made: dict[str, Any] = (await http.post(f"/api/v1/{path}", json=body)).json()
    return made


async def _model(http: httpx.AsyncClient) -> str:
    name: str = (await http.get("/oai/api/v1/models")).json()["data"][0]["id"]
    return name


PASS, COMPLETIONS = "/api/v1/forward_backward", "/oai/api/v1/completions"
HEAD = b"GET / HTTP/1.1\r\nhost: x\r\nx: "
HEALTH = "GET /api/v1/healthz HTTP/1.1\r\nhost: x\r\nx-api-key: {}\r\n\r\n"
SLOW = (
    "POST /api/v1/forward HTTP/1.1\r\nhost: x\r\nx-api-key: {}\r\n"
    "content-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
)
ATTACKS: Mapping[str, Attack] = {
    # Small on the wire, large as objects.
    "deflated_json": posting("/api/v1/forward", JSON | ZSTD, lambda _: deflated_json_body()),
    "empty_datums": posting(PASS, PROTOBUF | ZSTD, lambda _: empty_datums_body()),
    "empty_fields": posting(PASS, PROTOBUF | ZSTD, lambda _: empty_fields_body()),
    "tiny_datums": posting(PASS, PROTOBUF | ZSTD, tiny_datums_of_a_run),
    "wrong_last_datum": posting(PASS, PROTOBUF | ZSTD, wrong_last_datum_of_a_run),
    "wrong_numbers": posting(COMPLETIONS, JSON | ZSTD, lambda _: wrong_numbers_body()),
    # Much work for one request.
    "long_text": posting(COMPLETIONS, JSON, long_text_body),
    "big_retrieves": posting("/api/v1/retrieve_futures", JSON, big_retrieve_body, RETRIEVES_AT_ONCE),
    # Connections: idle, or with heads, requests or bodies that arrive slowly. The first two need no key.
    "descriptor_flood": holding(lambda *_: b""),
    "slow_heads": holding(lambda sent, _: b"x" if sent else HEAD),
    "many_connections": holding(lambda _, key: HEALTH.format(key).encode()),
    "slow_bodies": holding(lambda sent, key: b"[" if sent else SLOW.format(key).encode()),
}  # fmt: skip
