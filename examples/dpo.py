"""Direct preference optimization: a loss of our own, over what the server computes.

Of two answers to a question the one in small letters is preferred. The loss compares four log-probs: of
either answer, under the run and under the base model it began as. `forward_backward_custom` asks the
server for log-probs, differentiates the loss here in torch, and has the server go on from there.
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
"""How far the run may go from the base model for the sake of a preference."""


def main() -> None:
    """Train on preferences, and show how often, and how clearly, unseen pairs follow them."""
    options = options_of(__doc__, STEPS)
    with opened(options) as (service, base_model):
        run = service.create_lora_training_client(base_model, RANK, seed=1)
        tokenizer = run.get_tokenizer()
        unseen = preferences(tokenizer, holdout())
        reference = logprobs(run, unseen)
        batches = [preferences(tokenizer, batch(step, ROWS)) for step in range(options.steps)]
        # Nothing is trained yet, so the run is still the base model: its log-probs are the reference.
        references = [logprobs(run, data) for data in batches]
        rows = [("held out, before", *judged(run, unseen, reference))]
        training = counted("Training", train(run, batches, references), options.steps)
        for step, trained in enumerate(training, 1):
            rows.append((f"step {step}", *trained))
        rows.append(("held out, after", *judged(run, unseen, reference)))
    show("Preferences", ("when", "loss", "margin", "share right"), rows, options)


def preferences(tokenizer: Any, pairs: Sequence[Pair]) -> list[Datum]:
    """Make two datums of each pair: the preferred answer, then the other."""
    both = [
        Pair(pair.question, answer)
        for pair in pairs
        for answer in (pair.answer.lower(), pair.answer)
    ]
    return datums(tokenizer, both)


def logprobs(run: TrainingClient, data: list[Datum]) -> Reference:
    """Ask for the log-probs of datums, each [tokens], without a gradient."""
    outputs = run.forward(data, "cross_entropy").result().loss_fn_outputs
    return [output["logprobs"].to_torch() for output in outputs]


def train(
    run: TrainingClient, batches: list[list[Datum]], references: list[Reference]
) -> Iterator[tuple[float, float, float]]:
    """Take a step per batch; yields loss, margin and share of pairs in the right order."""
    for data, reference in zip(batches, references, strict=True):
        passed = run.forward_backward_custom(data, dpo_loss(reference))
        stepped = run.optim_step(ADAM)  # behind both passes that the loss takes
        yield shown(passed.result().metrics)
        stepped.result()


def dpo_loss(reference: Reference) -> Any:
    """Make the loss: it gets datums and their log-probs, and gives a scalar and metrics."""

    def loss_of(
        data: list[Datum], policy: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        weights = [torch.tensor(datum.loss_fn_inputs["weights"].data) for datum in data]
        gains = torch.stack(  # [datums]: how much likelier each answer is than it was
            [
                (weight * (now - then)).sum()
                for weight, now, then in zip(weights, policy, reference, strict=True)
            ]
        )
        margins = gains[0::2] - gains[1::2]
        loss = -torch.nn.functional.logsigmoid(BETA * margins).mean()
        right = (margins > 0).float().mean()
        return loss, {"dpo": loss.item(), "margin": margins.mean().item(), "right": right.item()}

    return loss_of


def judged(
    run: TrainingClient, data: list[Datum], reference: Reference
) -> tuple[float, float, float]:
    """Compute loss, margin and share right of pairs that are not trained on."""
    return shown(dpo_loss(reference)(data, logprobs(run, data))[1])


def shown(metrics: dict[str, float]) -> tuple[float, float, float]:
    """Pick what the table shows."""
    return metrics["dpo"], metrics["margin"], metrics["right"]


if __name__ == "__main__":
    main()
