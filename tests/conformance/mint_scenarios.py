"""Scenarios of the `mint` client: the ordinary loop, and both of its extensions.

Run as `python -m tests.conformance.mint_scenarios BASE_URL BASE_MODEL SCENARIO…` from the root,
with `mint` and its pinned SDK first on the path, and its key in MINT_API_KEY. Prints one JSON
object, scenario → facts; the tests check the facts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import mint as tinker  # the smallest migration, as in its README
import mint.mint as mintx
import torch
from mint import types

Facts = dict[str, Any]

VOCAB = 512
STUDENT, TEACHER = [5, 6, 7], [8, 9, 10, 11, 12, 13]
ANSWERS = ([20, 21, 22, 23], [30, 31])


class Bench:
    """The service client, and the base model it trains."""

    def __init__(self, base_model: str) -> None:
        self.base_model = base_model
        self.service = tinker.ServiceClient()  # key and address are in the environment

    def run(self, seed: int = 7, rank: int = 4) -> Any:
        """Start a run."""
        return self.service.create_lora_training_client(self.base_model, rank=rank, seed=seed)

    def taught(self, seed: int, context: Sequence[int], steps: int = 6) -> Any:
        """Start a run and train it on the answers after a context."""
        run = self.run(seed)
        data = [
            types.Datum(
                model_input=types.ModelInput.from_ints([*context, *answer[:-1]]),
                loss_fn_inputs={
                    "target_tokens": torch.tensor([*context[1:], *answer]),
                    "weights": torch.tensor([0.0] * (len(context) - 1) + [1.0] * len(answer)),
                },
            )
            for answer in ANSWERS
        ]
        for _ in range(steps):
            loss = run.forward_backward(data, "cross_entropy")
            run.optim_step(types.AdamParams(learning_rate=2e-2)).result()
            loss.result()
        return run


def tensor(values: Sequence[float], dtype: str) -> types.TensorData:
    """Make a tensor of one row."""
    return types.TensorData(data=list(values), dtype=dtype, shape=[len(values)])


def kl_data(reference: Sequence[int] = TEACHER) -> list[mintx.ReverseKLDatum]:
    """Make examples whose reference model sees a different prompt."""
    return [
        mintx.ReverseKLDatum(
            student_input=types.ModelInput.from_ints(STUDENT),
            reference_input=types.ModelInput.from_ints(list(reference)),
            target_tokens=tensor(answer, "int64"),
            weights=tensor([1.0] * len(answer), "float32"),
        )
        for answer in ANSWERS
    ]


def scores(bench: Bench, path: str, prompt: Sequence[int] = STUDENT) -> list[list[float]]:
    """Score the answers with sampler weights."""
    sampler = bench.service.create_sampling_client(model_path=path)
    found = [sampler.compute_logprobs(types.ModelInput.from_ints([*prompt, *answer])).result() for answer in ANSWERS]
    return [[value for value in row if value is not None] for row in found]


def loop(bench: Bench) -> Facts:
    """Train, save, sample, without the extensions of mint."""
    run = bench.taught(7, STUDENT, steps=8)
    path = run.save_weights_for_sampler(name="taught").result().path
    sampler = bench.service.create_sampling_client(model_path=path)
    params = types.SamplingParams(max_tokens=3, temperature=0.0, stop=[])
    prompt = types.ModelInput.from_ints([*STUDENT, ANSWERS[0][0]])
    sampled = sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result()
    state = run.save_state("state").result().path
    restored = bench.service.create_training_client_from_state(state)
    again = restored.save_weights_for_sampler(name="again").result().path
    return {
        "path": path,
        "tokens": list(sampled.sequences[0].tokens),
        "scores": scores(bench, path),
        "restored": scores(bench, again),
    }


def not_a_number(bench: Bench) -> Facts:
    """Send a NaN in a datum, and continue with the same run."""
    run, n = bench.run(), len(STUDENT)

    def loss(weight: float) -> Any:
        inputs = {"target_tokens": torch.tensor(STUDENT), "weights": torch.tensor([weight] * n)}
        tokens = types.ModelInput.from_ints(STUDENT)
        data = [types.Datum(model_input=tokens, loss_fn_inputs=inputs)]
        return run.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]

    return {"said": error_of(lambda: loss(float("nan"))), "next_loss": loss(1.0)}


def distilled(bench: Bench) -> Facts:
    """Distil a trained run with another prompt into a new run, without counting requests."""
    teacher = bench.taught(7, TEACHER).save_weights_for_sampler(name="teacher").result().path
    run = bench.run(seed=8)
    before = run.save_weights_for_sampler(name="before").result().path
    results = []
    for _ in range(6):
        results.append(
            mintx.forward_backward_reverse_kl(run, reference_model_path=teacher, data=kl_data(), temperature=1.0)
        )
        run.optim_step(types.AdamParams(learning_rate=2e-2)).result()
    after = run.save_weights_for_sampler(name="after").result().path
    return {
        "metrics": [result.metrics for result in results],
        "losses": [[list(each.loss.data) for each in result.outputs] for result in results],
        "shapes": [each.loss.shape for each in results[0].outputs],
        "before": scores(bench, before),
        "after": scores(bench, after),
        "teacher": scores(bench, teacher, TEACHER),
    }


def referred(bench: Bench) -> Facts:
    """Measure a run against the base model in several ways, and against itself."""
    run = bench.taught(7, STUDENT, steps=3)
    itself = run.save_state("itself").result().path

    def measure(path: str, **given: Any) -> Facts:
        data = given.pop("data", kl_data(STUDENT))
        result = mintx.forward_backward_reverse_kl(run, reference_model_path=path, data=data, **given)
        return dict(result.metrics)

    return {
        "base": measure(bench.base_model),
        "hot": measure(bench.base_model, temperature=100.0),
        "itself": measure(itself),
        "one": measure(bench.base_model, data=kl_data(STUDENT)[:1]),
        # The number of the SDK's next request, which now cannot be sent: it waits for the number
        # before it.
        "numbered": measure(bench.base_model, seq_id=run._get_request_id() + 1),
    }


def refused(bench: Bench) -> Facts:
    """Send invalid requests, and continue with the same run."""
    run = bench.run()
    good = {"reference_model_path": bench.base_model, "data": kl_data()}

    def attempt(**changes: Any) -> str:
        return error_of(lambda: mintx.forward_backward_reverse_kl(run, **{**good, **changes}))

    path = run.save_weights_for_sampler(name="mine").result().path

    def mix(paths: list[str], coefficients: list[float], **given: Any) -> str:
        return error_of(
            lambda: mintx.interpolate_checkpoints(bench.service, source_paths=paths, coefficients=coefficients, **given)
        )

    return {
        "unknown": attempt(reference_model_path="tinker://nobody:train:0/sampler_weights/no"),
        "foreign scheme": attempt(reference_model_path="mint://teacher-step-0010"),
        "temperature": attempt(temperature=0.0),
        "empty": attempt(data=[]),
        "no sources": mix([], []),
        "counts": mix([path], [0.5, 0.5]),
        "output": mix([path], [1.0], output_path="tinker://x:train:0/sampler_weights/y"),
        "no source": mix(["tinker://nobody:train:0/sampler_weights/no"], [1.0]),
        "still": mintx.forward_backward_reverse_kl(run, **good).metrics["num_samples:sum"],
    }


def interpolated(bench: Bench) -> Facts:
    """Interpolate two trained runs, and one alone."""
    paths = [
        bench.taught(seed, STUDENT, steps=4).save_weights_for_sampler(name="source").result().path for seed in (1, 2)
    ]
    mixed = mintx.interpolate_checkpoints(
        bench.service, source_paths=paths, coefficients=[0.9, 0.1], output_path="ema-0001"
    )
    again = mintx.interpolate_checkpoints(bench.service, source_paths=[mixed.path, paths[1]], coefficients=[0.5, 0.5])
    alone = mintx.interpolate_checkpoints(bench.service, source_paths=paths[:1], coefficients=[1.0])
    return {
        "answer": mixed.model_dump(),
        "sources": paths,
        "again": again.path,
        "scores": [scores(bench, path) for path in (*paths, mixed.path, again.path)],
        "alone": scores(bench, alone.path),
    }


def error_of(act: Any) -> str:
    """Call a function that should fail, and return its error message."""
    try:
        act()
    except tinker.TinkerError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    """Run the scenarios that the command line names, and print their facts."""
    address, base_model, *names = sys.argv[1:]
    assert os.environ["MINT_BASE_URL"] == address
    bench = Bench(base_model)
    facts = {name: globals()[name](bench) for name in names}
    json.dump({"version": version("tinker"), **facts}, sys.stdout)


if __name__ == "__main__":
    main()
