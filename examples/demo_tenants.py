"""Tenants of the demo, and the training loop of each."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from demo_texts import TENANT_KINDS, tenant_text

from cotrain import AdamParams, Datum, ModelInput, ServiceClient, TensorData, TrainingClient

LENGTH = 128
ROWS = 8
STEPS = 32
HOLDOUT_ROWS = 24


@dataclass(frozen=True)
class Tenant:
    """Tenant with its own key, which trains one adapter on one kind of text."""

    name: str
    kind: str
    key: str
    rank: int
    loss: str
    targets: Mapping[str, bool]
    learning_rate: float = 3e-3

    @property
    def trains(self) -> str:
        """Return the parts of the model that its adapter trains."""
        return " ".join(part for part in ("attn", "mlp", "unembed") if self.targets[f"train_{part}"])


def targets(*parts: str) -> dict[str, bool]:
    """Return the arguments that select the parts of the model to train."""
    return {f"train_{part}": part in parts for part in ("attn", "mlp", "unembed")}


TENANTS = (
    Tenant("Ada", "algebra code", "tml-ada_key-of-the-demo", 8, "cross_entropy", targets("attn", "mlp")),
    Tenant("Ben", "package READMEs", "tml-ben_key-of-the-demo", 32, "importance_sampling", targets("mlp")),
    Tenant("Cleo", "operator headers", "tml-cleo_key-of-the-demo", 16, "ppo", targets("attn", "mlp", "unembed")),
    Tenant("Dan", "character tables", "tml-dan_key-of-the-demo", 4, "cispo", targets("attn", "unembed")),
)


@dataclass
class Progress:
    """Row of one tenant in the live table."""

    step: int = 0
    loss: float = float("nan")
    """Loss of the last batch, in nats per token."""
    cycle: int = 0
    tokens: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    before: dict[str, float] = field(default_factory=dict)
    """Held-out loss by kind of text, in nats per token, before the first step."""
    after: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Tokens trained on per second so far."""
        if self.started_at is None:
            return 0.0
        return self.tokens / max((self.ended_at or time.monotonic()) - self.started_at, 1e-3)


class Corpus:
    """Rows of tokens of every kind of text."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._rows = {
            (kind, part): self._cut(encode, getattr(tenant_text(kind), part))
            for kind in TENANT_KINDS
            for part in ("train", "holdout")
        }

    def batch(self, kind: str, step: int) -> list[list[int]]:
        """Return the rows of one step, each of `LENGTH` + 1 tokens."""
        return random.Random(step).sample(self._rows[kind, "train"], ROWS)

    def holdout(self, kind: str) -> list[list[int]]:
        """Return rows that no run trains on."""
        return self._rows[kind, "holdout"][:HOLDOUT_ROWS]

    @staticmethod
    def _cut(encode: Callable[[str], list[int]], texts: Sequence[str]) -> list[list[int]]:
        tokens = [token for text in texts for token in (*encode(text), 0)]
        return [tokens[at : at + LENGTH + 1] for at in range(0, len(tokens) - LENGTH, LENGTH)]


def train(
    tenant: Tenant, address: str, base_model: str, corpus: Corpus, progress: Progress, leaving: threading.Event
) -> None:
    """Evaluate all held-out texts, train, evaluate again. `leaving` stops the training early."""
    with ServiceClient(address, tenant.key) as service:
        run = service.create_lora_training_client(
            base_model, tenant.rank, seed=1, user_metadata={"text": tenant.kind}, **tenant.targets
        )
        progress.before = _holdout_losses(run, corpus)
        progress.started_at = time.monotonic()
        for step in range(1, STEPS + 1):
            if leaving.is_set():
                return
            _train_step(run, tenant, corpus.batch(tenant.kind, step), step, progress)
        progress.ended_at = time.monotonic()
        progress.after = _holdout_losses(run, corpus)


def _train_step(run: TrainingClient, tenant: Tenant, rows: list[list[int]], step: int, progress: Progress) -> None:
    if tenant.loss == "cross_entropy":
        data = [datum(row, weights=[1.0] * LENGTH) for row in rows]
    else:
        data = _as_good_samples(run, rows)
    # Both requests are sent at once, so the step takes one cycle, not two.
    loss = run.forward_backward(data, tenant.loss)
    step_done = run.optim_step(AdamParams(learning_rate=tenant.learning_rate, eps=1e-8))
    output = loss.result()
    step_done.result()
    progress.step = step
    progress.loss = _mean_loss(output.loss_fn_outputs)
    progress.cycle = int(output.metrics["clock_cycle:unique"])
    progress.tokens += ROWS * LENGTH


def _as_good_samples(run: TrainingClient, rows: list[list[int]]) -> list[Datum]:
    """Treat text as samples of the current policy that all earned the same reward."""
    seen = run.forward([datum(row, weights=[0.0] * LENGTH) for row in rows], "cross_entropy")
    return [
        datum(row, logprobs=outputs["logprobs"].tolist(), advantages=[1.0] * LENGTH)
        for row, outputs in zip(rows, seen.result().loss_fn_outputs, strict=True)
    ]


def _holdout_losses(run: TrainingClient, corpus: Corpus) -> dict[str, float]:
    futures = {
        kind: run.forward([datum(row, weights=[1.0] * LENGTH) for row in corpus.holdout(kind)], "cross_entropy")
        for kind in TENANT_KINDS
    }
    return {kind: _mean_loss(future.result().loss_fn_outputs) for kind, future in futures.items()}


def datum(row: list[int], **inputs: list[float]) -> Datum:
    """Make a datum of a row: every token but the last predicts the next one."""
    return Datum(model_input=ModelInput.from_ints(row[:-1]), loss_fn_inputs={"target_tokens": row[1:], **inputs})


def _mean_loss(outputs: list[dict[str, TensorData]]) -> float:
    logprobs = [value for arrays in outputs for value in arrays["logprobs"].data]
    return -sum(logprobs) / len(logprobs)
