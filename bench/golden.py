"""Digests of all responses of a server to a fixed workload, to compare two versions bit by bit.

    python -m bench golden --base-url http://127.0.0.1:8000 --api-key tml-… --base-model tiny >after.json

Six runs of mixed ranks, targets and losses train together, pipelined, for some steps; each saves, loads and
samples. Nothing of cotrain is imported, so the same file works with any version. Run it against both versions on one
machine, because CPU results depend on the processor and on the version of torch.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import itertools
import json
import random
import tarfile
from typing import Any

import httpx

from bench.support.record import Args, Options, Report

STEPS = 3
VOCAB = 128
#: Rank, trained targets and loss of each run.
RUNS = (
    (1, {"train_attn": True, "train_mlp": True, "train_unembed": True}, "cross_entropy"),
    (2, {"train_attn": True, "train_mlp": False, "train_unembed": False}, "importance_sampling"),
    (4, {"train_attn": False, "train_mlp": True, "train_unembed": False}, "ppo"),
    (8, {"train_attn": True, "train_mlp": True, "train_unembed": False}, "cispo"),
    (16, {"train_attn": False, "train_mlp": True, "train_unembed": True}, "dro"),
    (32, {"train_attn": True, "train_mlp": True, "train_unembed": True}, "cross_entropy"),
)
AGAIN = {408, 429, 503}
#: Fields of a response, at any depth, that differ between two runs of one version.
NAMES = {"metrics", "model_id", "path", "sampling_session_id", "size_bytes", "training_run_id"}
ADAM = {
    "learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 1.0,
}  # fmt: skip

OPTIONS: Options = {
    "base_url": "http://127.0.0.1:8000", "api_key": (str, "of any tenant"), "base_model": "tiny",
}  # fmt: skip


class Server:
    """Client of a server of any version, for one tenant."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the response to a request, sent again as long as the server answers with a retryable status."""
        while True:
            answer = await self.http.post(f"/api/v1/{route}", json=body)
            if answer.status_code not in AGAIN:
                break
            await asyncio.sleep(0.05)
        answer.raise_for_status()
        response: dict[str, Any] = answer.json()
        return response

    async def result(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        request = (await self.post(route, body))["request_id"]
        while (result := await self.post("retrieve_future", {"request_id": request})).get("type") == "try_again":
            pass
        if "error" in result:
            raise SystemExit(f"{route}: {result['error']}")
        return result

    async def archive(self, path: str) -> bytes:
        """Return the adapter weights of a checkpoint as safetensors, without metadata."""
        run, _, name = path.removeprefix("tinker://").partition("/")
        url = f"/api/v1/training_runs/{run}/checkpoints/{name}/archive"
        answer = await self.http.get(url, follow_redirects=True)
        answer.raise_for_status()
        with tarfile.open(fileobj=io.BytesIO(answer.content)) as files:
            weights = files.extractfile("adapter_model.safetensors")
            assert weights
            return without_metadata(weights.read())


def without_metadata(safetensors: bytes) -> bytes:
    """Return the tensors without metadata, which contain the name of the run."""
    begin = 8 + int.from_bytes(safetensors[:8], "little")
    table = json.loads(safetensors[8:begin])
    table.pop("__metadata__", None)
    return json.dumps(table, sort_keys=True).encode() + safetensors[begin:]


def digest(response: object) -> str:
    """Return the digest of a response without fields that differ between two runs of one version."""
    if not isinstance(response, bytes):
        kept = json.loads(
            json.dumps(response), object_hook=lambda found: {k: found[k] for k in found if k not in NAMES}
        )
        response = json.dumps(kept, sort_keys=True).encode()
    return hashlib.sha256(response).hexdigest()[:16]


def datum(draw: random.Random, loss: str) -> dict[str, Any]:
    count = draw.randint(1, 40)
    tokens = [draw.randrange(VOCAB) for _ in range(count + 1)]

    def floats(low: float, high: float) -> dict[str, Any]:
        return {"dtype": "float32", "data": [draw.uniform(low, high) for _ in range(count)]}

    inputs: dict[str, Any] = {"target_tokens": {"dtype": "int64", "data": tokens[1:]}}
    if loss == "cross_entropy":
        inputs["weights"] = floats(-0.5, 1.0)
    else:
        inputs |= {"logprobs": floats(-5.5, -4.5), "advantages": floats(-1.0, 1.0)}
    chunks = [{"type": "encoded_text", "tokens": tokens[:-1]}]
    return {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}


async def train(server: Server, base_model: str, number: int) -> dict[str, str]:
    """Train one run and return digests of its responses by name."""
    rank, targets, loss = RUNS[number]
    draw = random.Random(number)
    opened = await server.post("create_session", {"tags": [], "sdk_version": "golden"})
    session = opened["session_id"]
    create = {
        "session_id": session, "model_seq_id": 0, "base_model": base_model,
        "lora_config": {"rank": rank, "seed": number, **targets},
    }  # fmt: skip
    run = (await server.result("create_model", create))["model_id"]
    seqs, seen = itertools.count(1), dict[str, str]()

    def ask(route: str, **body: object) -> asyncio.Task[dict[str, Any]]:
        return asyncio.create_task(server.result(route, {"model_id": run, "seq_id": next(seqs), **body}))

    async def note(name: str, *tasks: asyncio.Task[dict[str, Any]]) -> dict[str, Any]:
        results = await asyncio.gather(*tasks)
        seen.update((f"run {number}: {name}.{n}", digest(one)) for n, one in enumerate(results))
        return results[0]

    async def steps(name: str) -> None:
        for step in range(STEPS):
            passes = []
            for route in ("forward_backward", "forward_backward", "forward"):
                data = [datum(draw, loss) for _ in range(draw.randint(1, 4))]
                passes.append(ask(route, **{f"{route}_input": {"data": data, "loss_fn": loss}}))
            await note(f"{name} {step}", *passes, ask("optim_step", adam_params=ADAM))

    await steps("step")
    saved = await note("save", ask("save_weights", path="golden"))
    await steps("later step")
    await note("load", ask("load_weights", path=saved["path"], optimizer=True))
    await steps("step after the load")
    sampler = await note("sampler", ask("save_weights_for_sampler", path="golden-sampler"))
    seen[f"run {number}: adapter"] = digest(await server.archive(sampler["path"]))
    session_id = (await server.post("create_sampling_session", {
        "session_id": session, "sampling_session_seq_id": 0, "model_path": sampler["path"],
    }))["sampling_session_id"]  # fmt: skip
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1 + number, 2, 3]}]}
    for n, temperature in enumerate((0.0, 1.0)):
        params = {"max_tokens": 24, "seed": number, "temperature": temperature}
        samples = await server.result("asample", {
            "sampling_session_id": session_id, "seq_id": n, "num_samples": 3, "prompt": prompt,
            "sampling_params": params, "prompt_logprobs": True,
        })  # fmt: skip
        seen[f"run {number}: samples at {temperature:g}"] = digest(samples)
    return seen


async def golden(base_url: str, api_key: str, base_model: str) -> dict[str, str]:
    headers = {"X-API-Key": api_key, "Accept": "application/json"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=120) as http:
        each = await asyncio.gather(*(train(Server(http), base_model, number) for number in range(len(RUNS))))
    return {name: value for seen in each for name, value in seen.items()}


def run(args: Args, _: Report) -> None:
    seen = asyncio.run(golden(args.base_url, args.api_key, args.base_model))
    print(json.dumps(dict(sorted(seen.items())), indent=2))
