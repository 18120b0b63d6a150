"""What the methods are tried on: one tenant's clients, a trained run and its checkpoints.

Everything is made when a row first asks for it, so that what a server cannot do fails the rows that
need it and no others.
"""

from __future__ import annotations

import itertools
import os
from functools import cached_property
from typing import Any, ClassVar

import tinker
import torch
from tinker import types

from tests.conformance.scenarios import batch, datum, step
from tests.conformance.scoreboard.hub import Hub

PROMPT = [7, 8, 9, 10, 11]
MAX_TOKENS = 4
PROJECT = "a-project"


class Place:
    """A tenant's place on a server, filled as it is looked at."""

    def __init__(self, base_model: str) -> None:
        self.base_model = base_model
        self.key = os.environ["TINKER_API_KEY"]
        self.foreign_key = os.environ["OTHER_API_KEY"]
        self.data = batch()
        self.policy_data = [
            datum(5, 5, logprobs=torch.full((5,), -1.0), advantages=torch.ones(5)),
        ]
        self.prompt = types.ModelInput.from_ints(PROMPT)
        self.params = types.SamplingParams(max_tokens=MAX_TOKENS, seed=3, stop=[])
        self.adam = types.AdamParams(learning_rate=1e-3)
        self._numbers = itertools.count()

    # ---- Clients ---------------------------------------------------------------------------------

    def new_service(self, **options: Any) -> Any:
        """Make a service client; this tenant's key and the address are in the environment."""
        return tinker.ServiceClient(**options)

    @cached_property
    def service(self) -> Any:
        """The service client that nobody closes."""
        return self.new_service()

    @cached_property
    def rest(self) -> Any:
        """The client of the REST half."""
        return self.service.create_rest_client()

    @cached_property
    def exchanging_rest(self) -> Any:
        """The same of a server that gives every key a token."""
        return tinker.ServiceClient(base_url=os.environ["EXCHANGING_BASE_URL"]).create_rest_client()

    @cached_property
    def project_service(self) -> Any:
        """A service client that belongs to a project."""
        return self.new_service(project_id=PROJECT)

    @cached_property
    def admin(self) -> Any:
        """The client of the REST half's administrators."""
        return tinker.AdminClient()

    def pending_run(self) -> Any:
        """Start a run; the newer SDKs only promise its client."""
        return self.service.create_lora_training_client(self.base_model, rank=4, seed=7)

    @cached_property
    def run(self) -> Any:
        """A run that has been trained a step."""
        run = made(self.pending_run())
        step(run, self.data)
        return run

    def pending_sampler(self) -> Any:
        """Sample from the base model; the newer SDKs only promise the client."""
        return self.service.create_sampling_client(base_model=self.base_model)

    @cached_property
    def sampler(self) -> Any:
        """A sampler of the base model."""
        return made(self.pending_sampler())

    @cached_property
    def hub(self) -> Hub:
        """A model hub to push to."""
        return Hub()

    # ---- Losses ----------------------------------------------------------------------------------

    loss_ranks: ClassVar = {"logprobs": 1, "weights": 1}

    @staticmethod
    def loss(logprobs: Any, weights: Any) -> tuple[Any, dict[str, Any]]:
        """Cross-entropy, in one's own words."""
        loss = -(logprobs * weights).sum()
        return loss, {"custom/loss:sum": loss}

    @cached_property
    def loss_handle(self) -> Any:
        """That loss, known to the service client's session."""
        return self.service.create_custom_loss(self.loss, self.loss_ranks).result()

    # ---- Names of things -------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        """The run, as REST knows it."""
        return str(self.run.model_id)

    @property
    def session_id(self) -> str:
        """The session of the service client."""
        return self.run_id.partition(":")[0]

    @property
    def sampler_id(self) -> str:
        """The sampler, as REST knows it."""
        return str(self.sampler._sampling_session_id)

    def new_sampler_id(self) -> str:
        """A sampler that no client has sampled from: each of its requests has a number of its own."""
        return str(made(self.pending_sampler())._sampling_session_id)

    def new_name(self) -> str:
        """A name that no checkpoint has."""
        return f"saved-{next(self._numbers)}"

    def new_path(self) -> str:
        """Save a training checkpoint that nobody else uses."""
        return str(self.run.save_state(self.new_name()).result().path)

    @cached_property
    def path(self) -> str:
        """A training checkpoint that stays."""
        return self.new_path()

    @cached_property
    def foreign_path(self) -> str:
        """A training checkpoint of another tenant."""
        service = self.new_service(api_key=self.foreign_key)
        run = made(service.create_lora_training_client(self.base_model, rank=4, seed=7))
        return str(run.save_state("theirs").result().path)

    @cached_property
    def sampler_path(self) -> str:
        """A checkpoint for sampling that stays."""
        return str(self.run.save_weights_for_sampler(self.new_name()).result().path)

    @cached_property
    def external_path(self) -> str:
        """An exported checkpoint that stays."""
        return str(self.run.save_weights_external(self.new_name()).result().path)


def made(client: Any) -> Any:
    """Wait for a client that the newer SDKs only promise."""
    return client.result() if hasattr(client, "result") else client
