"""Training scenarios, run under the official SDK that is first on the path.

Run as `python -m tests.conformance.scenarios BASE_URL BASE_MODEL SCENARIO…` from the root; prints
one JSON object, scenario → facts. The variables of `KEY_NAMES` hold the keys of the tenants. The
tests check the facts.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import tinker
import torch
from tinker import types

IS_OLD = version("tinker").startswith("0.22.")
VOCAB = 512
KEY_NAMES = ("TINKER_API_KEY", "OTHER_API_KEY", "THIRD_API_KEY", "FOURTH_API_KEY")

Facts = dict[str, Any]


class Bench:
    """One tenant's service client and the base model it trains."""

    def __init__(self, base_url: str, base_model: str, key_name: str = "TINKER_API_KEY") -> None:
        self.base_url = base_url
        self.base_model = base_model
        self.service = tinker.ServiceClient(base_url=base_url, api_key=os.environ[key_name])

    def of_key(self, index: int) -> Bench:
        """Return the bench of another tenant; index 0 is this one."""
        return Bench(self.base_url, self.base_model, KEY_NAMES[index])

    def run(self, rank: int = 4, seed: int = 7, **targets: bool) -> Any:
        """Start a run and wait until it exists."""
        client = self.service.create_lora_training_client(self.base_model, rank=rank, seed=seed, **targets)
        return client if IS_OLD else client.result()


def datum(length: int, seed: int, **inputs: Any) -> types.Datum:
    """Make a datum of random tokens with all-one weights, or other inputs."""
    tokens = torch.randint(0, VOCAB, (length + 1,), generator=torch.Generator().manual_seed(seed))
    inputs = inputs or {"weights": torch.ones(length)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:], **inputs},
    )


def batch(seed: int = 0) -> list[types.Datum]:
    """Make four datums of ragged lengths."""
    return [datum(length, seed + length) for length in (5, 9, 13, 8)]


def logprobs(output: Any) -> list[list[float]]:
    """List the log-probs of every datum."""
    return [outputs["logprobs"].tolist() for outputs in output.loss_fn_outputs]


def step(run: Any, data: list[types.Datum], learning_rate: float = 1e-2) -> tuple[Any, Any]:
    """Train one step the pipelined way: send both requests, then wait for both."""
    loss = run.forward_backward(data, "cross_entropy")
    optim = run.optim_step(types.AdamParams(learning_rate=learning_rate))
    return loss.result(), optim.result()


# ---- Scenarios -----------------------------------------------------------------------------------


def create(bench: Bench) -> Facts:
    """Start a run and read its description."""
    run = bench.run(rank=3)
    info = run.get_info()
    models = bench.service.get_server_capabilities().supported_models
    return {
        "model_id": info.model_id,
        "model_name": info.model_data.model_name,
        "is_lora": info.is_lora,
        "lora_rank": info.lora_rank,
        "models": [model.model_name for model in models],
        "tokens": run.get_tokenizer().encode("def main():"),
    }


def train(bench: Bench) -> Facts:
    """Train ten pipelined steps."""
    run, data = bench.run(), batch()
    steps = [step(run, data) for _ in range(10)]
    return {
        "losses": [loss.metrics["loss:sum"] for loss, _ in steps],
        "cycles": [loss.metrics["clock_cycle:unique"] for loss, _ in steps],
        "grad_norms": [optim.metrics["grad_norm"] for _, optim in steps],
        "lengths": [len(row) for row in logprobs(steps[0][0])],
    }


def train_async(bench: Bench) -> Facts:
    """Train three steps with the asynchronous calls, each awaited twice, all of them in flight."""

    run, data = bench.run(), batch()

    async def three_steps() -> list[float]:
        futures = []
        for _ in range(3):
            futures.append(await run.forward_backward_async(data, "cross_entropy"))
            await run.optim_step_async(types.AdamParams(learning_rate=1e-2))
        return [(await future).metrics["loss:sum"] for future in futures]

    return {"losses": asyncio.run(three_steps())}


def chunked(bench: Bench) -> Facts:
    """Send more datums than 0.22 puts into one request, and two of them alone."""
    run = bench.run()
    data = [datum(2 + index % 3, seed=index) for index in range(1030)]
    whole = run.forward_backward(data, "cross_entropy").result()
    ends = run.forward([data[0], data[-1]], "cross_entropy").result()
    return {
        "metrics": whole.metrics,
        "sum": sum(sum(row) for row in logprobs(whole)),
        "lengths": [len(row) for row in logprobs(whole)],
        "expected_lengths": [d.model_input.length for d in data],
        "whole_ends": [logprobs(whole)[0], logprobs(whole)[-1]],
        "ends": logprobs(ends),
        "grad_norm": run.optim_step(types.AdamParams()).result().metrics["grad_norm"],
    }


def one_bad(bench: Bench) -> Facts:
    """Send 1,100 datums with an invalid one (number 1,050).

    Measure the gradient that remains, and the one after a load discards it.
    """
    data = [datum(2, seed=index) for index in range(1100)]
    first_part = bench.run()
    first_part.forward_backward(data[:1024], "cross_entropy")
    data[1050] = datum(2, seed=0, weights=torch.tensor([1.0, float("nan")]))
    left, dropped = bench.run(), bench.run()
    facts = error_of(lambda: left.forward_backward(data, "cross_entropy").result())
    error_of(lambda: dropped.forward_backward(data, "cross_entropy").result())
    saved = dropped.save_state("without-a-gradient").result()
    dropped.load_state_with_optimizer(saved.path).result()
    for name, run in (("first_part", first_part), ("left", left), ("dropped", dropped)):
        facts[name] = run.optim_step(types.AdamParams()).result().metrics["grad_norm"]
    return facts


def accumulate(bench: Bench) -> Facts:
    """Send one run its batch at once and its twin one datum at a time."""
    once, bitwise, data = bench.run(), bench.run(), batch()
    step(once, data)
    for one in data:
        bitwise.forward_backward([one], "cross_entropy")
    bitwise.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return {
        "once": logprobs(once.forward(data, "cross_entropy").result()),
        "bitwise": logprobs(bitwise.forward(data, "cross_entropy").result()),
    }


def forward(bench: Bench) -> Facts:
    """Run passes that change nothing: forward, and an optim_step without a gradient."""
    run, data = bench.run(), batch()
    step(run, data)
    before = run.forward(data, "cross_entropy").result()
    grad_norm = run.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
    after = run.forward(data, "cross_entropy").result()
    return {"before": logprobs(before), "after": logprobs(after), "grad_norm": grad_norm}


def losses(bench: Bench) -> Facts:
    """Compute every policy loss of one datum, next to a reference value."""
    run, length = bench.run(), 12
    step(run, batch())
    generator = torch.Generator().manual_seed(1)
    lp = torch.tensor(logprobs(run.forward([datum(length, seed=3)], "cross_entropy").result())[0])
    q = lp + 0.5 * torch.randn(length, generator=generator)
    advantages = torch.randn(length, generator=generator)
    mask = (torch.arange(length) % 3 != 0).float()
    inputs = {"logprobs": q, "advantages": advantages}
    ratio = torch.exp(lp - q)
    sequence_ratio = torch.exp(((lp - q) * mask).sum() / mask.sum())
    clip = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}
    expected = {
        "importance_sampling": (-(ratio * advantages).sum(), inputs, None),
        "ppo": (-torch.minimum(ratio * advantages, ratio.clamp(0.7, 1.1) * advantages).sum(), inputs, clip),
        "cispo": (-(ratio.clamp(0.7, 1.1) * lp * advantages).sum(), inputs, clip),
        "dro": (-(lp * advantages - 0.5 * 0.05 * (lp - q) ** 2).sum(), inputs, {"beta": 0.05}),
        "gspo": (
            -torch.minimum(sequence_ratio * advantages, sequence_ratio.clamp(0.7, 1.1) * advantages).sum(),
            {**inputs, "sequence_ratio_mask": mask},
            clip,
        ),
    }
    facts: Facts = {}
    for name, (value, fields, config) in expected.items():
        data = [datum(length, seed=3, **fields)]
        output = run.forward_backward(data, name, config).result()
        grad_norm = run.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
        facts[name] = {
            "expected": value.item(),
            "loss": output.metrics["loss:sum"],
            "logprobs": len(logprobs(output)[0]),
            "grad_norm": grad_norm,
        }
    return facts


def soft_targets(bench: Bench) -> Facts:
    """Distil: many weighted targets per position, which the SDK sends as sparse matrices."""
    run, length, columns = bench.run(), 6, 64
    targets = torch.zeros(length, columns, dtype=torch.int64)
    weights = torch.zeros(length, columns)
    targets[:, :3] = torch.arange(3 * length).reshape(length, 3) + 1
    weights[:, :2] = torch.tensor([0.75, 0.25])
    sparse = types.Datum(
        model_input=types.ModelInput.from_ints(list(range(length))),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )
    dense = types.Datum(
        model_input=types.ModelInput.from_ints(list(range(length))),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(targets[:, :3].contiguous()),
            "weights": types.TensorData.from_torch(weights[:, :3].contiguous()),
        },
    )
    from_sparse = run.forward_backward([sparse], "cross_entropy").result()
    from_dense = run.forward_backward([dense], "cross_entropy").result()
    lp = from_sparse.loss_fn_outputs[0]["logprobs"]
    return {
        "was_sparse": sparse.loss_fn_inputs["weights"].sparse_crow_indices is not None,
        "shape": list(lp.to_torch().shape),
        "expected": -(weights * lp.to_torch()).sum().item(),
        "sparse_loss": from_sparse.metrics["loss:sum"],
        "dense_loss": from_dense.metrics["loss:sum"],
    }


def custom(bench: Bench) -> Facts:
    """Implement cross-entropy as a custom loss, and train its twin with the built-in one."""
    ours, builtin, data = bench.run(), bench.run(), batch()

    def my_loss(_: list[types.Datum], rows: list[torch.Tensor]) -> tuple[torch.Tensor, Facts]:
        loss = -torch.stack([row.sum() for row in rows]).sum()
        return loss, {"rows": float(len(rows))}

    output = ours.forward_backward_custom(data, my_loss).result()
    ours.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    loss, _ = step(builtin, data)
    return {
        "metrics": output.metrics,
        "loss": loss.metrics["loss:sum"],
        "custom": logprobs(ours.forward(data, "cross_entropy").result()),
        "builtin": logprobs(builtin.forward(data, "cross_entropy").result()),
        **({} if IS_OLD else on_server(bench, data)),
    }


def on_server(bench: Bench, data: list[types.Datum]) -> Facts:
    """Train with a traced loss that the server runs, and a twin with the same function here."""

    def pulled(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, Facts]:
        far = torch.exp((logprobs + 6).abs() * weights).clamp(max=3.0)
        loss = far.sum() / logprobs.shape[0]
        return loss, {"custom/far:sum": far.detach().max(), "custom/far:mean": far.detach().max()}

    def in_sum(datums: list[types.Datum], rows: list[torch.Tensor]) -> tuple[torch.Tensor, Facts]:
        weights = [each.loss_fn_inputs["weights"].to_torch() for each in datums]
        return torch.stack([pulled(*each)[0] for each in zip(rows, weights, strict=True)]).sum(), {}

    handle = bench.service.create_custom_loss(pulled, {"logprobs": 1, "weights": 1}).result()
    facts: Facts = {}
    for name, loss_fn in (("server", handle), ("client", in_sum)):
        run = bench.run()
        output = run.forward_backward_custom(data, loss_fn).result()
        run.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        facts[f"metrics_of_{name}"] = output.metrics
        facts[f"by_{name}"] = logprobs(run.forward(data, "cross_entropy").result())

    def refused(logprobs: torch.Tensor) -> tuple[torch.Tensor, Facts]:
        return logprobs @ logprobs, {}

    return facts | error_of(lambda: bench.service.create_custom_loss(refused, {"logprobs": 1}).result())


def failures(bench: Bench) -> Facts:
    """Send invalid requests, and continue with the same run after each."""
    run, data = bench.run(), batch()
    out_of_range = types.Datum(
        model_input=types.ModelInput.from_ints([1, VOCAB, 3]),
        loss_fn_inputs={"target_tokens": torch.tensor([1, 2, 3]), "weights": torch.ones(3)},
    )
    nan = datum(3, seed=0, weights=torch.tensor([1.0, float("nan"), 1.0]))
    wrong = {
        "unknown_loss": lambda: run.forward_backward(data, "no_such_loss"),
        "token": lambda: run.forward_backward([out_of_range], "cross_entropy"),
        "missing_input": lambda: run.forward_backward(data, "ppo"),
        "learning_rate": lambda: run.optim_step(types.AdamParams(learning_rate=-1.0)),
        "nan": lambda: run.forward_backward([nan], "cross_entropy"),
    }
    facts: Facts = {}
    for name, send in wrong.items():
        facts[name] = error_of(lambda send=send: send().result())
        facts[name]["next_loss"] = run.forward(data, "cross_entropy").result().metrics["loss:sum"]
    for name, rank in (("rank_0", 0), ("rank_huge", 10**9)):
        facts[name] = error_of(lambda rank=rank: bench.run(rank=rank))
    facts["base_model"] = error_of(lambda: Bench(bench.base_url, "no/such-model").run())
    return facts


def unsent(bench: Bench) -> Facts:
    """Send a request that 0.22 numbers and then cannot encode.

    Continue after it, and with a new client.
    """
    run, data = bench.run(), batch()
    nan = datum(3, seed=0, weights=torch.tensor([1.0, float("nan"), 1.0]))
    facts: Facts = {}
    for name, send in (
        ("itself", lambda: run.forward([nan], "cross_entropy")),
        ("behind", lambda: run.forward_backward(data, "cross_entropy")),
        ("later", lambda: run.optim_step(types.AdamParams())),
    ):
        facts[name] = error_of(lambda send=send: send().result(), ValueError)
    facts["next_loss"] = step(bench.run(), data)[0].metrics["loss:sum"]
    return facts


def two_tenants(bench: Bench) -> Facts:
    """Train two tenants' runs alone, one after the other, and then again at the same time."""
    benches = [bench, Bench(bench.base_url, bench.base_model, "OTHER_API_KEY")]
    alone = [_final_logprobs(each, seed) for seed, each in enumerate(benches)]
    together: list[Any] = [None, None]

    def work(index: int) -> None:
        together[index] = _final_logprobs(benches[index], index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"alone": alone, "together": together}


def only_reads(bench: Bench) -> Facts:
    """Read with a viewer's key, try to train, and close the session."""
    runs = bench.service.create_rest_client().list_training_runs(limit=1).result()
    refused = error_of(bench.run)
    if hasattr(bench.service, "close"):
        bench.service.close("success").result()
    return {"total": runs.cursor.total_count, "refused": refused}


def undisturbed(bench: Bench) -> Facts:
    """Train a few steps, and return the final log-probs."""
    return {"logprobs": _final_logprobs(bench, seed=0)}


def _final_logprobs(bench: Bench, seed: int) -> list[list[float]]:
    run, data = bench.run(rank=2 + 3 * seed, seed=seed), batch(seed)
    for _ in range(3):
        step(run, data)
    return logprobs(run.forward(data, "cross_entropy").result())


def error_of(act: Any, *also: type[Exception]) -> Facts:
    """Call a function that should fail with an error of the SDK or one of these; return the facts
    of the error."""
    try:
        act()
    except (tinker.TinkerError, *also) as error:
        return {"error": type(error).__name__, "message": str(error), "category": str(getattr(error, "category", None))}
    return {"error": None}


def run_named(scenarios: Mapping[str, Any]) -> None:
    """Run the scenarios that the command line names, and print their facts."""
    base_url, base_model, *names = sys.argv[1:]
    bench = Bench(base_url, base_model)
    facts = {name: scenarios[name](bench) for name in names}
    json.dump({"version": version("tinker"), **facts}, sys.stdout)
    sys.stdout.flush()
    # The transport of SDK 0.38 may abort while the interpreter shuts down, after all results have
    # arrived (seen in 4 of 48 runs under load).
    os._exit(0)


if __name__ == "__main__":
    run_named(globals())
