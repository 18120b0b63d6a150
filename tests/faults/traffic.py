"""Requests of a few tenants, and a client that retries until it succeeds.

A program is drawn from its seed alone. It is sent pipelined, out of order and sometimes twice,
during all faults. Its answers and the final state of each run must not depend on the faults.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from tests.faults.fairness import Accepted
from tests.faults.host import KEYS, MODEL
from tests.support.plain_http import NO_TLS

CYCLE_METRIC = "clock_cycle:unique"
RETRY_S = 0.05
#: Codes after which a client retries: pending, slow down, restarting.
AGAIN = {408, 429, 500, 502, 503, 504}
VOCAB = 128
#: Bodies of this many tokens are too large for Redis and go to the spool.
LONG = 1100
#: Datums, and tokens in each, whose log-probs are too large for Redis as well.
LARGE = (12, 400)
#: A recipient whose secret key was discarded.
RECIPIENT = "age164q2x3vl64uamwjgl97z2hn8ryqe9l8agdcwzaztf4uwk5vljv4qftk6j7"


class Refused(AssertionError):
    """The server gave an answer that a client cannot retry."""


@dataclass(frozen=True)
class Call:
    """One request of a run: its route, and its body without run and seq."""

    route: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Program:
    """Requests of one run: parts that are sent one after the other, each pipelined."""

    rank: int
    seed: int
    parts: Sequence[Sequence[Call]]
    end: Sequence[Call]
    """Requests after all faults; they bring the run back into its worker's memory."""
    samples: int = 2


def programs(seed: int, runs: int = 4, parts: int = 3) -> list[Program]:
    """Draw the requests of the runs of one trial."""
    return [_program(random.Random(f"{seed}/{number}"), parts) for number in range(runs)]


def without_samples(drawn: Sequence[Program]) -> list[Program]:
    """Remove the samples, which bisection would blame for several concurrent crashes."""
    return [replace(program, samples=0) for program in drawn]


def with_large_results(drawn: Sequence[Program]) -> list[Program]:
    """Enlarge the body and the result of every pass to more than 16 KB."""
    return [
        replace(
            program,
            parts=[[_enlarged(call) for call in calls] for calls in program.parts],
            end=[_enlarged(call) for call in program.end],
        )
        for program in drawn
    ]


def _enlarged(call: Call) -> Call:
    name = f"{call.route}_input"
    if name not in call.body:
        return call
    datums, tokens = LARGE
    data = [_datum((_tokens_of(datum) * (tokens + 1))[: tokens + 1]) for datum in call.body[name]["data"]]
    return Call(call.route, {name: {**call.body[name], "data": (data * datums)[:datums]}})


def _program(draw: random.Random, parts: int) -> Program:
    drawn = []
    for part in range(parts):
        calls = [call for _ in range(draw.randint(1, 2)) for call in _step(draw)]
        if part:
            path = f"s{draw.randrange(part)}"
            calls.insert(0, Call("load_weights", {"path": path, "optimizer": draw.random() < 0.7}))
        calls.append(Call("save_weights", {"path": f"s{part}"}))
        if draw.random() < 0.5:
            calls += _step(draw)
        if draw.random() < 0.4:
            external = {"path": f"e{part}", "age_encryption_recipients": [RECIPIENT]}
            calls.append(Call("save_weights_external", external))
        calls.append(Call("save_weights_for_sampler", {"sampling_session_seq_id": part}))
        calls.append(_pass(draw, "forward_backward"))  # a pending gradient, also at the end
        drawn.append(calls)
    end = [_pass(draw, "forward_backward")]
    return Program(draw.choice([2, 4, 8]), draw.randrange(1 << 30), drawn, end)


def _step(draw: random.Random) -> list[Call]:
    passes = [_pass(draw, draw.choice(["forward_backward"] * 3 + ["forward"])) for _ in range(2)]
    adam = {"learning_rate": 10 ** draw.uniform(-3, -2), "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    return [*passes, Call("optim_step", {"adam_params": adam})]


def _pass(draw: random.Random, route: str) -> Call:
    lengths = [LONG // 4] * 4 if draw.random() < 0.15 else [draw.randint(1, 12) for _ in range(2)]
    return a_pass(draw, route, lengths)


def a_pass(draw: random.Random, route: str, lengths: Sequence[int]) -> Call:
    """Draw a pass of datums of these lengths, in tokens."""
    data = []
    for length in lengths:
        data.append(_datum([draw.randrange(VOCAB) for _ in range(length + 1)]))
    return Call(route, {f"{route}_input": {"data": data, "loss_fn": "cross_entropy"}})


def _datum(tokens: Sequence[int]) -> dict[str, Any]:
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": {"dtype": "int64", "data": tokens[1:]},
            "weights": {"dtype": "float32", "data": [1.0] * (len(tokens) - 1)},
        },
    }


def _tokens_of(datum: Mapping[str, Any]) -> list[int]:
    (chunk,) = datum["model_input"]["chunks"]
    return list(chunk["tokens"])


def _tokens(body: Mapping[str, Any]) -> int:
    data = [datum for value in body.values() if isinstance(value, dict) for datum in value.get("data", [])]
    return sum(len(chunk["tokens"]) for datum in data for chunk in datum["model_input"]["chunks"])


@dataclass
class Client:
    """One tenant's connection to the server; it repeats unanswered requests."""

    http: httpx.AsyncClient
    draw: random.Random
    repeated: int = 0
    told_to_wait: Counter[int] = field(default_factory=Counter)
    """Number of rejections, by status code."""

    async def post(self, route: str, body: Mapping[str, Any]) -> bytes:
        """Repeat a request until it is answered."""
        while True:
            try:
                answer = await self.http.post(f"/api/v1/{route}", json=body)
            except httpx.TransportError:
                self.repeated += 1
            else:
                if answer.status_code == 200:
                    return answer.content
                if answer.status_code not in AGAIN:
                    raise Refused(f"{route}: {answer.status_code} {answer.text}")
                self.told_to_wait[answer.status_code] += 1
            await asyncio.sleep(RETRY_S * self.draw.random())

    async def submit(self, route: str, body: Mapping[str, Any]) -> str:
        """Send a request after a random delay, sometimes twice at once; both answers must name the
        same future."""
        await asyncio.sleep(0.02 * self.draw.random())
        times = 2 if self.draw.random() < 0.2 else 1
        answers = await asyncio.gather(*(self.post(route, body) for _ in range(times)))
        names = {json.loads(answer)["request_id"] for answer in answers}
        if len(names) > 1:
            raise Refused(f"{route} sent twice became {names}")
        return str(names.pop())

    async def result(self, request: str) -> bytes:
        """Wait for the result of a request."""
        return await self.post("retrieve_future", {"request_id": request})


@dataclass
class Played:
    """A run and the answers to its requests, without the parts that may differ between two plays."""

    run: str = ""
    answers: dict[str, Any] = field(default_factory=dict)
    accepted: dict[int, Accepted] = field(default_factory=dict)
    """By seq in the run."""


def client_of(address: str, seed: int, tenant: int = 0) -> Client:
    """Make a client of a tenant of the server at this address. The caller closes its `http`."""
    headers = {"X-API-Key": KEYS[tenant], "Accept": "application/json"}
    http = httpx.AsyncClient(base_url=address, headers=headers, timeout=60, verify=NO_TLS)
    return Client(http, random.Random(seed))


class Player:
    """Player of one run's program; every unexpected answer raises Refused."""

    def __init__(self, client: Client, program: Program) -> None:
        self._client = client
        self._program = program
        self._played = Played()
        self._session = ""
        self._seq = 0
        self._told: dict[str, bytes] = {}

    async def play(self) -> None:
        """Play everything but the end."""
        client, program = self._client, self._program
        self._session = json.loads(await client.post("create_session", {}))["session_id"]
        self._played.run = f"{self._session}:train:0"
        lora = {"rank": program.rank, "seed": program.seed}
        await self._ask("create_model", {
            "session_id": self._session, "model_seq_id": 0, "base_model": MODEL,
            "lora_config": lora,
        })  # fmt: skip
        for calls in program.parts:
            await self.send(calls)

    async def finish(self) -> Played:
        """Play the end, and read every answer once more."""
        await self.send(self._program.end)
        await asyncio.gather(*(self._ask_again(request) for request in self._told))
        return self._played

    async def send(self, calls: Sequence[Call]) -> None:
        """Send requests at once, and wait for all answers."""
        asked = []
        for call in calls:
            self._seq += 1
            asked.append(self._ask(call.route, self._with_default_seq(call)))
        await asyncio.gather(*asked)

    def _with_default_seq(self, call: Call) -> dict[str, Any]:
        body = {"model_id": self._played.run, "seq_id": self._seq, **call.body}
        if call.route == "load_weights":
            body["path"] = f"tinker://{self._played.run}/weights/{body['path']}"
        return body

    async def _ask(self, route: str, body: Mapping[str, Any]) -> None:
        request = await self._client.submit(route, body)
        if route != "asample":
            seq = body.get("seq_id", 0)
            self._played.accepted[seq] = Accepted(time.time(), route, _tokens(body))
        told = self._told[request] = await self._client.result(request)
        self._played.answers[request.replace(self._session, "S")] = self._comparable(told)
        if route == "save_weights_for_sampler":
            sampler = json.loads(told).get("sampling_session_id")
            if sampler is None:
                raise Refused(f"{request} became {told.decode():.300}")
            samples = range(self._program.samples)
            await asyncio.gather(*(self._sample(sampler, number) for number in samples))

    async def _sample(self, sampler: str, number: int) -> None:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1 + number, 2, 3]}]}
        await self._ask("asample", {
            "sampling_session_id": sampler, "seq_id": number, "num_samples": 1, "prompt": prompt,
            "sampling_params": {"max_tokens": 12, "seed": number, "temperature": 1.0},
        })  # fmt: skip

    async def _ask_again(self, request: str) -> None:
        if await self._client.result(request) != self._told[request]:
            raise Refused(f"{request} was answered twice, differently")

    def _comparable(self, told: bytes) -> Any:
        answer = json.loads(told.replace(self._session.encode(), b"S"))
        answer.get("metrics", {}).pop(CYCLE_METRIC, None)
        answer.pop("size_bytes", None)  # age adds random padding
        return answer
