"""Helpers that open the pages of a running server in a browser and train runs for the pages to
show."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import numpy as np

import cotrain
from cotrain import types
from cotrain_server.supervisor.data_folder import found_socket
from tests.support.serving import Serving
from tests.warm.popen import Popen

if TYPE_CHECKING:
    # Playwright is installed only for `make test-browser`.
    from playwright.sync_api import Browser, Page

BASE_MODEL = "tiny"


@dataclass(frozen=True)
class Trained:
    """A run, and the losses of its steps as its client computed them."""

    run: str
    losses: list[float]


@dataclass(frozen=True)
class Site:
    """A server, and the keys that may log in to its pages."""

    serving: Serving
    chromium: Browser
    admin_key: str
    keys: Mapping[str, str]
    runs: Mapping[str, Trained]
    data_dir: Path
    base_model: str
    """Base model that the server was started with."""

    @property
    def address(self) -> str:
        return self.serving.address

    @contextmanager
    def seen_by(self, who: str, width: int = 1280, scheme: Literal["light", "dark"] = "light") -> Iterator[Seen]:
        """Log in as the operator or a tenant. Check at the end that the page had no errors."""
        context = self.chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        seen = Seen(context.new_page(), self.address)
        seen.watch()
        seen.log_in(self.admin_key if who == "operator" else self.keys[who])
        try:
            yield seen
        finally:
            context.close()
        assert seen.errors == []
        assert seen.foreign == []

    @contextmanager
    def another_worker(self, name: str) -> Iterator[None]:
        """Run one more worker of the same base model. It must be drained before the block ends."""
        settings = {
            "REDIS_URL": f"unix://{found_socket(self.data_dir)}",
            "DATA_DIR": str(self.data_dir),
            "BASE_MODEL": self.base_model,
            "WORKER_ID": name,
            "TORCH_THREADS": "1",
        }
        environment = {f"COTRAIN_{each}": value for each, value in settings.items()}
        with (self.data_dir / f"{name}.log").open("w") as log:
            process = Popen(
                [sys.executable, "-P", "-m", "cotrain_workers"],
                env={**os.environ, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                yield
            finally:
                process.terminate()
                process.wait(60)


@dataclass
class Seen:
    """One browser that is logged in."""

    page: Page
    address: str
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def watch(self) -> None:
        """Record messages of the console and requests to other hosts."""
        own = urlsplit(self.address).netloc
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "request", lambda asked: self.foreign.append(asked.url) if urlsplit(asked.url).netloc != own else None
        )

    def log_in(self, key: str) -> None:
        self.page.goto(f"{self.address}/")
        self.page.fill("input[name=key]", key)
        self.page.keyboard.press("Enter")
        self.page.wait_for_url("**/ui")

    def open(self, path: str) -> Page:
        """Open a page of the server, which must not answer with an error."""
        answer = self.page.goto(self.address + path)
        assert answer
        assert answer.ok, f"{path}: {answer.status}"
        return self.page


def new_run(site: Site, who: str, seed: int | None = None) -> Any:
    """Make a run of rank 4 for a tenant."""
    client = cotrain.ServiceClient(base_url=site.address, api_key=site.keys[who])
    return client.create_lora_training_client(BASE_MODEL, rank=4, seed=seed)


def train(address: str, key: str, name: str, steps: int) -> Trained:
    """Train a run of rank 4 for some steps, and save it."""
    client = cotrain.ServiceClient(base_url=address, api_key=key)
    training = client.create_lora_training_client(BASE_MODEL, rank=4, user_metadata={"name": name})
    losses = [step(training) for _ in range(steps)]
    training.save_weights_for_sampler("final").result()
    return Trained(training.model_id, losses)


def step(training: Any) -> float:
    """Run one step and return its mean loss."""
    tokens = [7, 8, 9, 10] * 4
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, dtype=np.float32)},
    )
    done = training.forward_backward([datum], "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-3))
    loss: float = done.result().metrics["loss:sum"] / (len(tokens) - 1)
    stepped.result()
    return loss
