"""Measurement of one family of models against transformers and PEFT; `docs/reference/models.md` holds the results."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import GenerationConfig

from cotrain.export.adapter import read_adapter
from cotrain.export.base import find_base
from cotrain.export.formats import write_merged
from cotrain_store.blobs.folder import Folder
from cotrain_workers.checkpoints.peft_folder import read_folder, write_folder
from cotrain_workers.engine.adapters.adapter import initial_weights
from cotrain_workers.engine.decoding.requests import SampleOutput
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import HostWeights, KlDatum, Op, OptimStep, Pass, ReverseKl, ReverseKlOutput
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.decoding import decoder_of, finish, request, trainer_logprobs
from tests.support.draws import variant
from tests.support.mixtures import EagerOracle
from tests.support.shared_base import load_plain, shared_base
from tests.support.training import PeftOracle, Tenant, same_bits

#: Families whose layers others have too. The comments name them where the names of the families do not.
ALIKE = (
    "qwen3-window", "gemma3-wrapped", "gemma4", "gemma4-unified", "gemma4-unified-wrapped", "seed-oss",
    "arcee", "cwm", "hyperclovax", "olmo2", "ministral", "mistral3", "glm4_moe_lite", "solar_open",
    "dots1", "flex_olmo", "hunyuan_v1_moe", "qwen3-vl-moe", "qwen3_5", "qwen3_5-wrapped", "qwen3_5_moe",
    "qwen3_5_moe-wrapped", "lfm2_moe", "bamba", "granitemoehybrid-dense", "gemma4-moe-wrapped",
    "mistral",  # llama, and the window of phi3
    "gemma", "vaultgemma",  # gemma2, which also normalizes outputs
    "glm",  # glm4, likewise
    "ernie4.5",  # helium
    "jais2",  # nemotron, and the biases of starcoder2
    "granite",  # granitemoehybrid, with the same multipliers
    "smollm3", "exaone4",  # olmo3, and layers of cohere2 without positions
    "qwen2.5-vl",  # qwen3-vl, and the biases of qwen2
)  # fmt: skip
TOLERANCE = 1e-5
CYCLES = 3
PROMPT, GENERATED = 20, 6  # across a window of 16 and a page of 16
END = 2  # the token that ends a text in the tiny models
#: Two neighbours of other ranks, targets and losses. A sequence is longer than a window of 16.
MINE = Tenant("all-5", AdapterSpec(5, 1), "cross_entropy", (1, 21))
OTHER = Tenant("attn-2", AdapterSpec(2, 2, train_mlp=False, train_unembed=False), "cispo", (18,))


def first_of_a_kind(families: Iterable[str]) -> list[Any]:
    """Return rows of `parametrize`, of which `make test` leaves out families whose layers others have too."""
    return [variant(each) if each in ALIKE else each for each in families]


@dataclass(frozen=True)
class Measured:
    """Largest difference of any log-probability, by what computes it, and the claims that hold exactly or not."""

    training: float  # after CYCLES steps, to PEFT and torch's AdamW, one sequence at a time
    sampling: float  # of prompts and samples, to our trainer
    export: float  # of a written folder in plain PEFT, to our trainer
    merged: float  # of merged weights in plain transformers, to our trainer
    reverse_kl: float  # of a token's divergence from the base model, to PEFT
    is_alone_equal: bool  # a run among others has the bits of the run alone with recomputed layers
    is_restored: bool  # its neighbour, restored alone, continues with the same bits
    is_greedy_equal: bool  # greedy samples are those of `generate`

    @property
    def largest(self) -> float:
        """The largest difference."""
        return max(self.training, self.sampling, self.export, self.merged, self.reverse_kl)


def measure(model: Path, scratch: Path) -> Measured:
    """Train, sample, export and restore adapters of a tiny model, and compare each with another way to do so.

    `scratch` is an empty folder.
    """
    together, alone = (
        Engine.load(str(model), load_base=shared_base, recompute=recompute) for recompute in ("never", "always")
    )
    for cycle in range(CYCLES):
        if cycle == CYCLES - 1:
            alone.adapters.restore(OTHER.run, together.adapters.state(OTHER.run))
            alone.run(_ops(OTHER, cycle))
        mine, other = _ops(MINE, cycle), _ops(OTHER, cycle)
        together.run([*other[:2], *mine, *other[2:]])
        alone.run(mine)
    layout = together.adapters[MINE.run].layout
    new_oracle = EagerOracle if layout.gate_by_experts else PeftOracle
    oracle = new_oracle(model, MINE.spec, torch.float32)
    oracle.load(layout, initial_weights(MINE.spec, layout))
    assert len(oracle.parameters()) == 2 * len(layout.targets)
    _train(oracle)
    ours = trainer_logprobs(together, MINE.run, *_sequences())
    training = _apart(oracle.model, ours)
    oracle.load(layout, together.adapters.state(MINE.run).weights)
    sampling, is_greedy_equal = _sampled(oracle.model, together)
    is_same = {
        run: same_bits(*(each.adapters.state(run) for each in (together, alone))) for run in (MINE.run, OTHER.run)
    }
    plain, merged = _exported(model, together, scratch)
    return Measured(
        training=training,
        sampling=sampling,
        export=_apart(plain, ours),
        merged=_apart(merged, ours),
        reverse_kl=_reverse_kl(oracle.model, together),
        is_alone_equal=is_same[MINE.run],
        is_restored=is_same[OTHER.run],
        is_greedy_equal=is_greedy_equal,
    )


def _ops(tenant: Tenant, cycle: int) -> list[Op]:
    """Return a tenant's ops of one cycle. A large eps keeps rounding errors of tiny gradients out of the steps."""
    return [replace(op, eps=1e-3) if isinstance(op, OptimStep) else op for op in tenant.ops(cycle)]


def _sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, 128, length) for length in (2, PROMPT)]


def _apart(plain: Any, ours: Sequence[np.ndarray]) -> float:
    """Return the largest difference of log-probabilities of a plain model and our trainer."""
    errors = []
    for tokens, found in zip(_sequences(), ours, strict=True):
        with torch.no_grad():
            logits = plain(input_ids=torch.from_numpy(tokens)[None]).logits[0, :-1]
        theirs = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(tokens[1:, None]))[:, 0]
        errors.append(float((torch.from_numpy(found) - theirs).abs().max()))
    return max(errors)


def _train(oracle: PeftOracle) -> None:
    """Run all steps of `MINE`."""
    optimizer = torch.optim.AdamW(oracle.parameters())
    for op in (op for cycle in range(CYCLES) for op in _ops(MINE, cycle)):
        if isinstance(op, Pass) and op.needs_grad:
            oracle.backward(op)
        elif isinstance(op, OptimStep):
            optimizer.param_groups[0].update(
                lr=op.learning_rate, betas=(op.beta1, op.beta2), eps=op.eps, weight_decay=op.weight_decay
            )
            torch.nn.utils.clip_grad_norm_(oracle.parameters(), op.grad_clip_norm)
            optimizer.step()
            optimizer.zero_grad()


def _saved(engine: Engine, run: str) -> HostWeights:
    state = engine.adapters.state(run)
    return HostWeights(state.spec, state.weights)


def _sampled(plain: Any, engine: Engine) -> tuple[float, bool]:
    """Return the largest difference of sampled log-probabilities to the trainer's; and True if greedy
    samples are those of `generate`.
    """
    prompt = _sequences()[-1]
    asked = [
        request(
            f"{run}-{temperature}", prompt, run,
            max_tokens=GENERATED, temperature=temperature, prompt_logprobs=True,
            stop_tokens=frozenset({END}),
        )
        for run, temperature in ((MINE.run, 0.0), (OTHER.run, 1.0), (MINE.run, 1.0))
    ]  # fmt: skip
    weights = {run: _saved(engine, run) for run in (MINE.run, OTHER.run)}
    found, errors, samples = finish(decoder_of(engine, weights), asked), [], []
    for each in asked:
        result = found[each.id]
        assert isinstance(result, SampleOutput), result
        assert each.weights is not None
        assert result.prompt_logprobs is not None
        samples.append(np.concatenate([prompt, result.sequences[0].tokens]))
        ours = np.concatenate([result.prompt_logprobs[1:], result.sequences[0].logprobs])
        (theirs,) = trainer_logprobs(engine, each.weights, samples[-1])
        errors.append(float(np.abs(ours - theirs).max()))
    return max(errors), samples[0].tolist() == _generated(plain, prompt)


def _generated(plain: Any, prompt: np.ndarray) -> Sequence[int]:
    settings = GenerationConfig(max_new_tokens=GENERATED, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        tokens = plain.generate(
            input_ids=torch.from_numpy(prompt)[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            generation_config=settings,
        )
    found: Sequence[int] = tokens[0].tolist()
    return found


def _exported(model: Path, engine: Engine, scratch: Path) -> tuple[Any, Any]:
    """Return plain PEFT with the written folder of an adapter, and plain transformers with merged weights."""
    weights, layout_of = _saved(engine, MINE.run), engine.adapters.layout_of
    folder = write_folder(Folder(scratch), weights, layout_of(weights.spec), "a/base")
    assert torch.equal(read_folder(Folder(scratch), folder.digest, layout_of).flat, weights.flat)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tied embeddings, and deprecated names of transformers
        plain = PeftModel.from_pretrained(
            load_plain(model, torch.float32), scratch / folder.key, low_cpu_mem_usage=True
        )
    (merged := scratch / "merged").mkdir()
    adapter = read_adapter(scratch / folder.key)
    write_merged(find_base(str(model)), adapter, merged, None, lambda done, total: None)
    return plain, load_plain(merged, torch.float32)


@torch.no_grad()
def _reverse_kl(plain: Any, engine: Engine) -> float:
    tokens = _sequences()[-1]
    datum = KlDatum(tokens, tokens, np.ones(len(tokens), np.float32))
    output = engine.run([ReverseKl(MINE.run, 90, [datum], None, 1.0)]).outputs[MINE.run, 90]
    assert isinstance(output, ReverseKlOutput), output

    def logprobs() -> torch.Tensor:
        return torch.log_softmax(plain(input_ids=torch.from_numpy(tokens)[None]).logits[0], -1)

    p = logprobs()
    with plain.disable_adapter():
        q = logprobs()
    theirs = (p.exp() * (p - q)).sum(-1)
    return float((torch.from_numpy(output.losses[0]) - theirs).abs().max())
