"""Direct preference optimization: a custom loss over log-probs of the server.

Of two answers to a question, the one in lower case is preferred. The loss compares four log-probs:
those of each answer under the run and under the base model.

The call `forward_backward_custom` requests log-probs from the server, differentiates the loss in
the client with torch, and sends the gradient back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opening import counted, needed, opened, options_of, show
from unicode_names import Pair, batch, datums, holdout

from cotrain import AdamParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from cotrain import Datum, TrainingClient

    Reference = list[torch.Tensor]
else:
    torch = needed("torch")

STEPS = 10
RANK, ROWS = 16, 16
ADAM = AdamParams(learning_rate=5e-4, eps=1e-8)
BETA = 0.1
"""Strength of the penalty for leaving the base model."""


def main() -> None:
    """Train on preferences. Show the share of unseen pairs that follow them, and the margin."""
    options = options_of(__doc__, STEPS)
    with opened(options) as (service, base_model):
        run = service.create_lora_training_client(base_model, RANK, seed=1)
        tokenizer = run.get_tokenizer()
        unseen = preferences(tokenizer, holdout())
        reference = logprobs(run, unseen)
        batches = [preferences(tokenizer, batch(step, ROWS)) for step in range(options.steps)]
        # The run is untrained and still equals the base model, so its log-probs are the reference.
        references = [logprobs(run, data) for data in batches]
        rows = [("held out, before", *judged(run, unseen, reference))]
        training = counted("Training", train(run, batches, references), options.steps)
        for step, trained in enumerate(training, 1):
            rows.append((f"step {step}", *trained))
        rows.append(("held out, after", *judged(run, unseen, reference)))
    show("Preferences", ("when", "loss", "margin", "share right"), rows, options)


def preferences(tokenizer: Any, pairs: Sequence[Pair]) -> list[Datum]:
    """Make two datums of each pair: the preferred answer, then the other."""
    both = [Pair(pair.question, answer) for pair in pairs for answer in (pair.answer.lower(), pair.answer)]
    return datums(tokenizer, both)


def logprobs(run: TrainingClient, data: list[Datum]) -> Reference:
    """Request the log-probs of datums, each [tokens], without a gradient."""
    outputs = run.forward(data, "cross_entropy").result().loss_fn_outputs
    return [output["logprobs"].to_torch() for output in outputs]


def train(
    run: TrainingClient, batches: list[list[Datum]], references: list[Reference]
) -> Iterator[tuple[float, float, float]]:
    """Train one step per batch. Yield loss, margin and share of pairs in the right order."""
    for data, reference in zip(batches, references, strict=True):
        passed = run.forward_backward_custom(data, dpo_loss(reference))
        stepped = run.optim_step(ADAM)  # executes after both passes of the loss
        yield shown(passed.result().metrics)
        stepped.result()


def dpo_loss(reference: Reference) -> Any:
    """Return the loss function: it maps datums and their log-probs to a scalar and metrics."""

    def loss_of(data: list[Datum], policy: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        weights = [torch.tensor(datum.loss_fn_inputs["weights"].data) for datum in data]
        gains = torch.stack(  # [datums]: gain in log-prob of each answer
            [(weight * (now - then)).sum() for weight, now, then in zip(weights, policy, reference, strict=True)]
        )
        margins = gains[0::2] - gains[1::2]
        loss = -torch.nn.functional.logsigmoid(BETA * margins).mean()
        right = (margins > 0).float().mean()
        return loss, {"dpo": loss.item(), "margin": margins.mean().item(), "right": right.item()}

    return loss_of


def judged(run: TrainingClient, data: list[Datum], reference: Reference) -> tuple[float, float, float]:
    """Compute loss, margin and share right of held-out pairs."""
    return shown(dpo_loss(reference)(data, logprobs(run, data))[1])


def shown(metrics: dict[str, float]) -> tuple[float, float, float]:
    """Return the numbers of a table row."""
    return metrics["dpo"], metrics["margin"], metrics["right"]


if __name__ == "__main__":
    main()
