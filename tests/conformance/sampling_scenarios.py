"""Sampling scenarios, run under the official SDK that is first on the path.

Run as `python -m tests.conformance.sampling_scenarios BASE_URL BASE_MODEL SCENARIO…` from the root.
Prints one JSON object, scenario → facts; the tests check the facts.
"""

from __future__ import annotations

import pickle
import threading
import time
from concurrent.futures import CancelledError
from typing import Any

import tinker
import torch
from tinker import types

from tests.conformance.scenarios import IS_OLD, VOCAB, Bench, Facts, batch, error_of, run_named, step

PROMPT = [7, 8, 9, 10, 11]
MAX_TOKENS = 8
CROWD = 12
GROUP = 4
RL_STEPS = 2


def prompt(tokens: list[int] | None = None) -> types.ModelInput:
    """Make a prompt."""
    return types.ModelInput.from_ints(PROMPT if tokens is None else tokens)


def params(**given: Any) -> types.SamplingParams:
    """Make sampling parameters: by default a few tokens from a seed, without stops."""
    return types.SamplingParams(**{"max_tokens": MAX_TOKENS, "seed": 3, "stop": [], **given})


def made(client: Any) -> Any:
    """Wait for a client that the newer SDK returns as a promise."""
    return client if IS_OLD else client.result()


def base_sampler(bench: Bench) -> Any:
    """Return a sampler of the base model."""
    return made(bench.service.create_sampling_client(base_model=bench.base_model))


def sampler_of(run: Any) -> Any:
    """Return a sampler of a run's current weights."""
    return made(run.save_weights_and_get_sampling_client())


def trained(bench: Bench, steps: int = 2, **lora: Any) -> Any:
    """Start a run and train it a few steps."""
    run = bench.run(**lora)
    for _ in range(steps):
        step(run, batch())
    return run


def told(response: Any) -> list[Facts]:
    """List the fields of a response's sequences, except their ids."""
    return [
        {"tokens": list(s.tokens), "logprobs": list(s.logprobs or ()), "stop_reason": s.stop_reason}
        for s in response.sequences
    ]


def sample(sampler: Any, num_samples: int = 1, tokens: list[int] | None = None, **given: Any) -> Any:
    """Sample and wait."""
    return sampler.sample(prompt(tokens), num_samples, params(**given)).result()


# ---- Scenarios -----------------------------------------------------------------------------------


def sampled(bench: Bench) -> Facts:
    """Sample several sequences, twice with one seed and once with another."""
    sampler = base_sampler(bench)
    first = sample(sampler, 3)
    return {
        "first": told(first),
        "again": told(sample(sampler, 3)),
        "other": told(sample(sampler, 3, seed=4)),
        "alone": told(sample(sampler, 1)),
        "unseeded": [told(sampler.sample(prompt(), 1, params(seed=None)).result()) for _ in "ab"],
        "ids": [getattr(sequence, "sequence_id", None) for sequence in first.sequences],
        "base_model": sampler.get_base_model(),
    }


def chosen(bench: Bench) -> Facts:
    """Reduce the choice to one token: greedy, top-k of one, a tiny top-p."""
    sampler = base_sampler(bench)
    facts: Facts = {
        "greedy": told(sample(sampler, 2, temperature=0.0)),
        "top_k": told(sample(sampler, 2, top_k=1)),
        "top_p": told(sample(sampler, 2, top_p=1e-6)),
        "hot": told(sample(sampler, 2, temperature=5.0)),
    }
    if not IS_OLD:
        likeliest = sampler.sample(prompt(), 1, params(temperature=0.0), topk_sample_logprobs=3).result()
        facts["topk"] = [list(map(list, row)) for row in likeliest.sequences[0].topk_logprobs]
    return facts


def stopped(bench: Bench) -> Facts:
    """Stop in every supported form, at a known position."""
    sampler = base_sampler(bench)
    tokenizer = sampler.get_tokenizer()
    free = list(sample(sampler, temperature=0.0).sequences[0].tokens)
    text = tokenizer.decode(free[2:4])
    forms = {"token": [free[3]], "string": text, "strings": ["never to be seen", text], "nowhere": [], "default": None}
    facts: Facts = {name: told(sample(sampler, temperature=0.0, stop=stop))[0] for name, stop in forms.items()}
    facts["text"] = text
    facts["texts"] = {name: tokenizer.decode(facts[name]["tokens"]) for name in forms}
    facts["free"] = free
    facts["empty"] = told(sample(sampler, max_tokens=0))[0]
    facts["one_token_prompt"] = told(sample(sampler, tokens=[5]))[0]
    facts["to_the_end"] = told(sample(sampler, tokens=[5] * 500, max_tokens=None))[0]
    return facts


def scored(bench: Bench) -> Facts:
    """Score a sampled sequence in every way, and by a forward pass of its run."""
    run = trained(bench)
    sampler = sampler_of(run)
    (sequence,) = sample(sampler).sequences
    whole = PROMPT + list(sequence.tokens)
    row = types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={"target_tokens": torch.tensor(whole[1:]), "weights": torch.ones(len(whole) - 1)},
    )
    output = run.forward([row], "cross_entropy").result()
    response = sampler.sample(
        prompt(whole), 1, params(max_tokens=1), include_prompt_logprobs=True, topk_prompt_logprobs=4
    ).result()
    facts: Facts = {
        "sampled": list(sequence.logprobs),
        "forward": output.loss_fn_outputs[0]["logprobs"].tolist(),
        "computed": sampler.compute_logprobs(prompt(whole)).result(),
        "prompt": response.prompt_logprobs,
        "topk": [row and [list(cell) for cell in row] for row in response.topk_prompt_logprobs],
        "whole": whole,
    }
    if not IS_OLD:
        targets = torch.full((len(whole) - 1, 2), -1)
        targets[:, 0] = torch.tensor(whole[1:])
        of_targets = sampler.sample(
            prompt(whole),
            1,
            params(max_tokens=1),
            include_prompt_logprobs=True,
            target_prompt_logprobs=types.TensorData.from_torch(targets),
            prompt_logprobs_last_n=3,
        ).result()
        facts["targets"] = of_targets.target_prompt_logprobs.to_torch().tolist()
        facts["last"] = of_targets.prompt_logprobs
        facts["computed_last"] = sampler.compute_logprobs(prompt(whole), 2).result()
    return facts


def saved(bench: Bench) -> Facts:
    """Save under a name, train on, save under the name again; samplers keep their weights."""
    run = trained(bench)
    first = run.save_weights_for_sampler("best").result().path
    named = made(bench.service.create_sampling_client(model_path=first))
    own = sampler_of(run)
    before = told(sample(named))
    step(run, batch(5))
    second = run.save_weights_for_sampler("best").result().path
    return {
        "paths": [first, second],
        "run": run.get_info().model_id,
        "base_model": named.get_base_model(),
        "before": before,
        "own": told(sample(own)),
        "after": told(sample(named)),
        "own_after": told(sample(own)),
        "moved": told(sample(made(run.create_sampling_client(second)))),
        "newest": told(sample(sampler_of(run))),
        "forward": run.forward(batch(), "cross_entropy").result().metrics["loss:sum"],
    }


def crowded(bench: Bench) -> Facts:
    """Sample with a seed alone, then concurrently with other adapters, prompts and lengths."""
    samplers = [base_sampler(bench), *(sampler_of(trained(bench, rank=r)) for r in (1, 4, 7))]
    alone = [told(sample(sampler)) for sampler in samplers]
    neighbours = [
        samplers[n % 4].sample(prompt([n + 1] * (n % 9 + 1)), n % 3 + 1, params(seed=n, max_tokens=n % 12 + 1))
        for n in range(CROWD)
    ]
    among = [sampler.sample(prompt(), 1, params()) for sampler in samplers]
    return {
        "alone": alone,
        "among": [told(future.result()) for future in among],
        "lengths": [[len(s.tokens) for s in future.result().sequences] for future in neighbours],
    }


def pickled(bench: Bench) -> Facts:
    """Sample from clones of one client."""
    sampler = base_sampler(bench)
    clones = [pickle.loads(pickle.dumps(sampler)) for _ in range(2)]
    return {
        "original": told(sample(sampler)),
        "clones": [told(sample(clone)) for clone in clones],
        "original_again": told(sample(sampler)),
    }


def cancelled(bench: Bench) -> Facts:
    """Cancel a long sample, and continue."""
    sampler = base_sampler(bench)
    future = sampler.sample(prompt(), 8, params(max_tokens=400))
    time.sleep(0.3)  # until it is accepted: an unsent request needs no cancel
    inner = future if IS_OLD else future.future()
    was_cancelled = inner.cancel()
    try:
        future.result(timeout=120)
        outcome = "done"
    except CancelledError:
        outcome = "cancelled"
    return {"was_cancelled": was_cancelled, "outcome": outcome, "next": told(sample(sampler))}


def refused(bench: Bench) -> Facts:
    """Send invalid requests, and continue with the same sampler after each."""
    sampler, service = base_sampler(bench), bench.service
    stranger = Bench(bench.base_url, bench.base_model, "OTHER_API_KEY")
    path = bench.run().save_weights_for_sampler("mine").result().path
    wrong = {
        "too_long": lambda: sample(sampler, tokens=[1] * 600),
        "token": lambda: sample(sampler, tokens=[VOCAB]),
        "empty": lambda: sample(sampler, tokens=[]),
        "top_k": lambda: sample(sampler, top_k=VOCAB + 1),
        "temperature": lambda: sample(sampler, temperature=-1.0),
        "top_p": lambda: sample(sampler, top_p=0.0),
        "no_such_path": lambda: made(service.create_sampling_client(model_path=path.replace("mine", "yours"))),
        "no_path": lambda: made(service.create_sampling_client(model_path="tinker://nowhere")),
        "no_model": lambda: made(service.create_sampling_client(base_model="no/such-model")),
        "foreign": lambda: made(stranger.service.create_sampling_client(model_path=path)),
    }
    facts: Facts = {name: error_of(act) for name, act in wrong.items()}
    facts["next"] = told(sample(sampler))
    return facts


def reinforced(bench: Bench) -> Facts:
    """Run the pipelined RL loop of two tenants, one after another, and then both at once."""
    benches = [bench.of_key(index) for index in range(2)]
    alone = [_reinforce(each, seed) for seed, each in enumerate(benches)]
    together: list[Any] = [None] * len(benches)

    def work(index: int) -> None:
        together[index] = _reinforce(benches[index], index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(benches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"alone": alone, "together": together}


def burst(bench: Bench) -> Facts:
    """Send more samples at once than the queue holds, and receive every result."""
    sampler = base_sampler(bench)
    futures = [sampler.sample(prompt([n + 1]), 1, params(seed=n)) for n in range(CROWD)]
    return {"sequences": [told(future.result())[0] for future in futures]}


def undisturbed(bench: Bench) -> Facts:
    """Save and sample a little with seeds, as the reference for runs with faults."""
    run = trained(bench)
    samplers = [base_sampler(bench), sampler_of(run)]
    return {"sequences": [told(sample(each, 2)) for each in samplers for _ in range(2)]}


def _reinforce(bench: Bench, seed: int) -> Facts:
    """Sample, train on the samples, and sample from the new weights."""
    run = bench.run(rank=2 + seed, seed=seed)
    sampler, log = sampler_of(run), []
    for number in range(RL_STEPS):
        response = sample(sampler, GROUP, seed=10 * seed + number)
        rewards = [float(sum(token % 2 for token in s.tokens)) for s in response.sequences]
        mean = sum(rewards) / len(rewards)
        data = [
            _datum(list(sequence.tokens), list(sequence.logprobs), reward - mean)
            for sequence, reward in zip(response.sequences, rewards, strict=True)
        ]
        loss = run.forward_backward(data, "importance_sampling")
        optim = run.optim_step(types.AdamParams(learning_rate=1e-2))
        sampler = sampler_of(run)
        log.append({"sampled": told(response), "loss": loss.result().metrics["loss:sum"]})
        optim.result()
        trained_on = [o["logprobs"].tolist() for o in loss.result().loss_fn_outputs]
        log[-1]["trained"] = [row[len(PROMPT) - 1 :] for row in trained_on]
    return {"steps": log}


def _datum(tokens: list[int], logprobs: list[float], advantage: float) -> types.Datum:
    whole, before = PROMPT + tokens, [0.0] * (len(PROMPT) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": torch.tensor(whole[1:]),
            "logprobs": torch.tensor(before + logprobs),
            "advantages": torch.tensor(before + [advantage] * len(tokens)),
        },
    )


if __name__ == "__main__":
    assert tinker.__name__  # the SDK under test, imported before the first request
    run_named(globals())
