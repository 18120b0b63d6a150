"""Trained adapters for sampling with the vLLM decoder, and helpers for requests to it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from cotrain_store.blobs.folder import Folder
from cotrain_store.messages.runs import LoraSpec
from cotrain_workers.checkpoints.peft_folder import write_folder
from cotrain_workers.engine.decoding.requests import NO_TOP_K, SampledSequence, SampleOutput, SampleRequest, StepResults
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Create, Datum, Failure, HostWeights, OptimStep, Pass, PassOutput
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.sampling.vllm.client import VllmServer
from cotrain_workers.sampling.vllm.decoder import Adapter, VllmDecoder, VllmSampler
from tests.support.training import random_datum

BASE = "tiny/qwen3"
VOCAB = 512
PROMPT = np.arange(40, 48)


class Trained:
    """Engine with a few runs that were trained for one step, and the folders of their weights."""

    SPECS = (
        AdapterSpec(4, seed=0),
        AdapterSpec(1, seed=1, train_unembed=False),
        AdapterSpec(8, seed=2, train_attn=False, train_unembed=False),
        AdapterSpec(2, seed=3, train_mlp=False, train_unembed=False),
        AdapterSpec(3, seed=4, train_unembed=False, alpha=7.0),
    )

    def __init__(self, model: Path, root: Path) -> None:
        self.engine = Engine.load(str(model))
        self.folders: dict[str, Path] = {}
        rng = np.random.default_rng(0)
        for number, spec in enumerate(self.SPECS):
            run = f"run-{number}"
            data = [random_datum(rng, "cross_entropy", 12, vocab=VOCAB)]
            step = OptimStep(run, 2, 3e-2, 0.9, 0.95, 1e-8, 0.0, grad_clip_norm=0.0)
            forward_backward = Pass(run, 1, data, "cross_entropy", {}, needs_grad=True)
            self.engine.run([Create(run, 0, spec), forward_backward, step])
            weights = HostWeights(spec, self.engine.adapters.state(run).weights)
            layout = self.engine.adapters[run].layout
            self.folders[run] = root / write_folder(Folder(root), weights, layout, BASE).key

    def decoder(self, url: str, **settings: Any) -> VllmDecoder:
        """Return a decoder that uses the server at `url` for these runs."""
        folder = settings.pop("folder", self.folders.__getitem__)
        spec_by_name = {path.name: spec for path, spec in zip(self.folders.values(), self.SPECS, strict=True)}

        def adapter_of(key: str) -> Adapter | None:
            path = folder(key)
            return Adapter(path, LoraSpec(**asdict(spec_by_name[path.name]))) if path else None

        return VllmDecoder(VllmSampler(VllmServer(url, ""), BASE, self.engine.targets, **settings), adapter_of)

    def logprobs(self, run: str, tokens: Sequence[int]) -> np.ndarray:
        """Return the trainer's log-probs of `tokens[1:]`."""
        inputs = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1)}
        datum = Datum(np.array(tokens[:-1]), inputs)
        forward = Pass(run, 9, [datum], "cross_entropy", {}, needs_grad=False)
        output = self.engine.run([forward]).outputs[run, 9]
        assert isinstance(output, PassOutput)
        return output.logprobs[0]


def request(name: str = "q", weights: str | None = None, **changes: Any) -> SampleRequest:
    plain = SampleRequest(
        id=name,
        weights=weights,
        prompt=PROMPT,
        num_samples=1,
        max_tokens=6,
        temperature=1.0,
        top_k=NO_TOP_K,
        top_p=1.0,
        seed=7,
        stop_tokens=frozenset(),
        stop_strings=(),
        prompt_logprobs=False,
        topk_prompt_logprobs=0,
        topk_sample_logprobs=0,
        prompt_logprobs_last_n=None,
        target_prompt_logprobs=None,
    )
    return replace(plain, **changes)


def run(decoder: VllmDecoder, *requests: SampleRequest) -> dict[str, SampleOutput | Failure]:
    for each in requests:
        assert decoder.refuse(each) is None
        decoder.add(each)
    return finish(decoder)


def finish(decoder: VllmDecoder) -> dict[str, SampleOutput | Failure]:
    return {name: output for each in steps(decoder) for name, output in each.finished}


def steps(decoder: VllmDecoder) -> Iterator[StepResults]:
    """Yield every step until no work is left."""
    while decoder.busy:
        yield decoder.step()
        time.sleep(0.001)  # a step never waits, and the server computes on the same cores


def sampled(output: SampleOutput | Failure) -> SampleOutput:
    assert isinstance(output, SampleOutput), output
    return output


def tokens(output: SampleOutput | Failure) -> list[list[int]]:
    return [sequence.tokens.tolist() for sequence in sampled(output).sequences]


def the_only(output: SampleOutput | Failure) -> SampledSequence:
    (sequence,) = sampled(output).sequences
    return sequence
