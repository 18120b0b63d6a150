"""Resuming after a crash: the training program is killed, started again, and continues.

Every few steps it saves its weights and its optimizer; the checkpoint's name has the number of the step.
A start continues from the newest checkpoint. With `--name`, this file is the training program. Without,
it kills that program, and compares its losses with those of an undisturbed training.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping

from opening import base_model_of, counted, log, opened, options_of, served, show
from unicode_names import batch, datums

from cotrain import AdamParams, ServiceClient, TrainingClient

STEPS = 16
SAVE_EVERY = 5
KILLED_AFTER = 7
"""Number of steps; the last two are lost and repeated."""
KEPT_S = 3600
RANK, ROWS = 16, 16
ADAM = AdamParams(learning_rate=3e-3, eps=1e-8)


def train(service: ServiceClient, base_model: str, name: str, steps: int) -> Iterator[tuple[int, float]]:
    """Train from the newest checkpoint of this name, or from the start. Yield steps and losses."""
    run, done = newest(service, name) or (service.create_lora_training_client(base_model, RANK, seed=1), 0)
    tokenizer = run.get_tokenizer()
    for step in range(done + 1, steps + 1):
        data = datums(tokenizer, batch(step, ROWS))
        passed, stepped = run.forward_backward(data, "cross_entropy"), run.optim_step(ADAM)
        if step % SAVE_EVERY == 0:
            # Requests of a run keep their order: the checkpoint includes this step and nothing of the next.
            run.save_state(f"{name}-{step}", ttl_seconds=KEPT_S).result()
        stepped.result()
        yield step, passed.result().loss


def newest(service: ServiceClient, name: str) -> tuple[TrainingClient, int] | None:
    """Open the newest checkpoint of this name. Return a run that continues from it, and its step."""
    for checkpoint in service.list_checkpoints():  # newest first
        saved_as, _, step = checkpoint.checkpoint_id.rpartition("/")[2].rpartition("-")
        if saved_as == name:
            path = checkpoint.tinker_path
            return service.create_training_client_from_state_with_optimizer(path), int(step)
    return None


def main() -> None:
    """Train undisturbed, then with a kill, and show both losses. With a name, only train."""
    options = options_of(__doc__, STEPS, name="")
    if options.name:
        train_and_print(options)
        return
    with served() as (address, key):
        key = key or os.environ["COTRAIN_API_KEY"]
        with ServiceClient(address, key) as service:
            base_model = options.base_model or base_model_of(service)
            training = train(service, base_model, f"calm-{secrets.token_hex(4)}", options.steps)
            calm = dict(counted("Training undisturbed", training, options.steps))
        program = [sys.executable, __file__, "--steps", str(options.steps)]
        program += ["--name", f"killed-{secrets.token_hex(4)}", "--base-model", base_model]
        settings = {**os.environ, "COTRAIN_BASE_URL": address, "COTRAIN_API_KEY": key}
        log.print(f"Training again, until a kill after step {KILLED_AFTER} …")
        first = losses_of(program, settings, killed_after=KILLED_AFTER)
        log.print("Continuing from the checkpoint …")
        second = losses_of(program, settings)
    rows = [(f"step {step}", loss, first.get(step, ""), second.get(step, "")) for step, loss in calm.items()]
    show("Nats per token", ("when", "undisturbed", "killed", "resumed"), rows, options)
    if not options.json:
        same = all(calm[step] == loss for step, loss in (first | second).items())
        print("The same to the last bit." if same else "Not the same!")


def losses_of(program: list[str], settings: Mapping[str, str], killed_after: int | None = None) -> dict[int, float]:
    """Run the training program and return its losses by step. Kill it (SIGKILL) after the step `killed_after`, if given."""
    losses = {}
    with subprocess.Popen(program, env=settings, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            step, loss = line.split()
            losses[int(step)] = float(loss)
            if int(step) == killed_after:
                process.kill()
                break
    return losses


def train_and_print(options: Namespace) -> None:
    """Train, and print each step with its loss for `losses_of`."""
    with opened(options) as (service, base_model):
        for step, loss in train(service, base_model, options.name, options.steps):
            print(step, loss, flush=True)


if __name__ == "__main__":
    main()
