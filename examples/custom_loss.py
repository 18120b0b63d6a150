"""The focal loss, a custom loss that emphasizes hard tokens.

A token's cross-entropy is multiplied by (1 - p)^gamma, so tokens that are already predicted well
hardly count. The loss is written in torch and runs in the client; with gamma = 0 it equals the
cross-entropy of the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opening import counted, needed, opened, options_of, show
from unicode_names import batch, datums, holdout

from cotrain import AdamParams

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from cotrain import Datum, TrainingClient

    Loss = Callable[[list[Datum], list[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]]
else:
    torch = needed("torch")

STEPS = 20
RANK, ROWS = 16, 16
ADAM = AdamParams(learning_rate=3e-3, eps=1e-8)
GAMMAS = (0.0, 1.0, 2.0)
HARD_SHARE = 0.1


def main() -> None:
    """Train one run on the server's cross-entropy and one for each gamma, and show the results."""
    options = options_of(__doc__, STEPS)
    rows = []
    with opened(options) as (service, base_model):
        names = ["cross_entropy", *(f"focal, gamma {gamma:g}" for gamma in GAMMAS)]
        losses = ["cross_entropy", *map(focal, GAMMAS)]
        for name, loss in zip(names, losses, strict=True):
            run = service.create_lora_training_client(base_model, RANK, seed=1)
            tokenizer = run.get_tokenizer()
            unseen = datums(tokenizer, holdout())
            if not rows:
                rows.append(("before", *losses_of(run, unseen)))
            for step in counted(f"Training on {name}", range(options.steps), options.steps):
                train_step(run, datums(tokenizer, batch(step, ROWS)), loss)
            rows.append((name, *losses_of(run, unseen)))
    columns = ("trained on", "all tokens", f"hardest {HARD_SHARE:.0%}")
    show("Held-out loss, nats per token", columns, rows, options)


def focal(gamma: float) -> Loss:
    """Return a loss function: it maps datums and their log-probs to a scalar to minimize and to
    metrics."""

    def loss_of(data: list[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        total = torch.zeros(())
        for datum, logprob in zip(data, logprobs, strict=True):  # logprob: [tokens]
            weight = torch.tensor(datum.loss_fn_inputs["weights"].data)
            total = total - (weight * (1 - logprob.exp()) ** gamma * logprob).sum()
        return total, {"focal": total.item()}

    return loss_of


def train_step(run: TrainingClient, data: list[Datum], loss: str | Loss) -> None:
    """Run one training step with a built-in loss or a custom one."""
    passed = run.forward_backward(data, loss) if isinstance(loss, str) else run.forward_backward_custom(data, loss)
    stepped = run.optim_step(ADAM)  # executes after both passes of a custom loss
    passed.result()
    stepped.result()


def losses_of(run: TrainingClient, data: list[Datum]) -> tuple[float, float]:
    """Compute the mean loss of all weighted tokens, and of the hardest of them."""
    outputs = run.forward(data, "cross_entropy").result().loss_fn_outputs
    losses = sorted(
        -logprob
        for datum, output in zip(data, outputs, strict=True)
        for weight, logprob in zip(datum.loss_fn_inputs["weights"].data, output["logprobs"].data, strict=True)
        if weight
    )
    hard = losses[-max(1, int(HARD_SHARE * len(losses))) :]
    return sum(losses) / len(losses), sum(hard) / len(hard)


if __name__ == "__main__":
    main()
