"""Objects that the methods are tried on: one tenant's clients, a trained run and its checkpoints.

Every object is made on first use, so that an operation that the server lacks fails only the rows
that need it.
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
from tests.support.fake_hub import FakeHub

PROMPT = [7, 8, 9, 10, 11]
MAX_TOKENS = 4
PROJECT = "a-project"


class Place:
    """Clients, runs and checkpoints of a tenant, made on first use."""

    def __init__(self, base_model: str) -> None:
        self.base_model = base_model
        self.key = os.environ["TINKER_API_KEY"]
        self.foreign_key = os.environ["OTHER_API_KEY"]
        self.data = batch()
        self.policy_data = [datum(5, 5, logprobs=torch.full((5,), -1.0), advantages=torch.ones(5))]
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
        """Service client that stays open."""
        return self.new_service()

    @cached_property
    def rest(self) -> Any:
        """Client of the REST API."""
        return self.service.create_rest_client()

    @cached_property
    def exchanging_rest(self) -> Any:
        """Client of the REST API of a server that exchanges every key for a token."""
        return tinker.ServiceClient(base_url=os.environ["EXCHANGING_BASE_URL"]).create_rest_client()

    @cached_property
    def project_service(self) -> Any:
        """Service client with a project."""
        return self.new_service(project_id=PROJECT)

    @cached_property
    def admin(self) -> Any:
        """Client of the REST API for administrators."""
        return tinker.AdminClient()

    def pending_run(self) -> Any:
        """Start a run; the newer SDKs return its client as a promise."""
        return self.service.create_lora_training_client(self.base_model, rank=4, seed=7)

    @cached_property
    def run(self) -> Any:
        """Run that has been trained one step."""
        run = made(self.pending_run())
        step(run, self.data)
        return run

    def pending_sampler(self) -> Any:
        """Create a sampler of the base model; the newer SDKs return the client as a promise."""
        return self.service.create_sampling_client(base_model=self.base_model)

    @cached_property
    def sampler(self) -> Any:
        """Sampler of the base model."""
        return made(self.pending_sampler())

    @cached_property
    def hub(self) -> FakeHub:
        """Model hub to push to."""
        return FakeHub().__enter__()  # until the process ends

    # ---- Losses ----------------------------------------------------------------------------------

    loss_ranks: ClassVar = {"logprobs": 1, "weights": 1}

    @staticmethod
    def loss(logprobs: Any, weights: Any) -> tuple[Any, dict[str, Any]]:
        """Cross-entropy as a custom loss."""
        loss = -(logprobs * weights).sum()
        return loss, {"custom/loss:sum": loss}

    @cached_property
    def loss_handle(self) -> Any:
        """Handle of that loss, registered in the service client's session."""
        return self.service.create_custom_loss(self.loss, self.loss_ranks).result()

    # ---- Names of things -------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        """Run id of the REST API."""
        return str(self.run.model_id)

    @property
    def session_id(self) -> str:
        """Session id of the service client."""
        return self.run_id.partition(":")[0]

    @property
    def sampler_id(self) -> str:
        """Sampler id of the REST API."""
        return str(self.sampler._sampling_session_id)

    def new_sampler_id(self) -> str:
        """Id of an unused sampler: each of its requests has its own number."""
        return str(made(self.pending_sampler())._sampling_session_id)

    def new_name(self) -> str:
        """Unused name of a checkpoint."""
        return f"saved-{next(self._numbers)}"

    def new_path(self) -> str:
        """Save a training checkpoint that no other row uses."""
        return str(self.run.save_state(self.new_name()).result().path)

    @cached_property
    def path(self) -> str:
        """Training checkpoint that is kept."""
        return self.new_path()

    @cached_property
    def foreign_path(self) -> str:
        """Training checkpoint of another tenant."""
        service = self.new_service(api_key=self.foreign_key)
        run = made(service.create_lora_training_client(self.base_model, rank=4, seed=7))
        return str(run.save_state("theirs").result().path)

    @cached_property
    def sampler_path(self) -> str:
        """Checkpoint for sampling that is kept."""
        return str(self.run.save_weights_for_sampler(self.new_name()).result().path)

    @cached_property
    def external_path(self) -> str:
        """Exported checkpoint that is kept."""
        return str(self.run.save_weights_external(self.new_name()).result().path)


def made(client: Any) -> Any:
    """Wait for a client that the newer SDKs return as a promise."""
    return client.result() if hasattr(client, "result") else client
