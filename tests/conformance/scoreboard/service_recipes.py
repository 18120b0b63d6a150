"""Recipes of a service client, and of the functions of `tinker.auth`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tinker import types
from tinker.lib.retry_handler import RetryConfig

from tests.conformance.scoreboard.calls import Recipe, call, check
from tests.conformance.scoreboard.place import Place

METADATA = {"a": "b"}


def _is_of_rank_4(client: Any) -> bool:
    return bool(client.get_info().lora_rank == 4)


def is_new_path(at: Place) -> Callable[[Any], bool]:
    """Return a check that a copy has a new path."""
    paths = {at.path, at.foreign_path}
    return lambda answer: answer.startswith("tinker://") and answer not in paths


def samples(at: Place) -> Callable[[Any], bool]:
    """Return a check that a sampling client samples."""
    return lambda sampler: bool(sampler.sample(at.prompt, 1, at.params).result().sequences)


def serves(at: Place) -> Callable[[Any], bool]:
    """Return a check that the base model is in the list of models."""
    return lambda answer: at.base_model in [each.model_name for each in answer.supported_models]


SERVICE: Mapping[str, Recipe] = {
    "close": lambda at: call(at.new_service(), "success", detail="done"),
    "copy_weights": lambda at: check(is_new_path(at), at.project_service, at.path),
    "copy_weights(ttl_seconds)": lambda at: check(is_new_path(at), at.project_service, at.path, ttl_seconds=3600),
    "copy_weights(weights_access_token)": lambda at: check(
        is_new_path(at), at.project_service, at.foreign_path, weights_access_token=at.foreign_key
    ),
    "create_custom_loss": lambda at: check(
        lambda handle: handle.name == at.loss.__name__, *(at.new_service(), at.loss), input_ranks=at.loss_ranks
    ),
    "create_lora_training_client": lambda at: check(_is_of_rank_4, at.service, at.base_model, rank=4),
    "create_lora_training_client(seed, train_…, user_metadata)": lambda at: check(
        _is_of_rank_4,
        *(at.service, at.base_model),
        rank=4,
        seed=1,
        train_attn=True,
        train_mlp=False,
        train_unembed=False,
        user_metadata=METADATA,
    ),
    "create_lora_training_client(optimizer=AdamOptimizerConfig)": lambda at: call(
        at.service, at.base_model, optimizer=types.AdamOptimizerConfig()
    ),
    "create_lora_training_client(optimizer=DimuonOptimizerConfig)": lambda at: call(
        at.service, at.base_model, optimizer=types.DimuonOptimizerConfig()
    ),
    "create_rest_client": lambda at: call(at.service),
    "create_sampling_client": lambda at: check(samples(at), at.service, base_model=at.base_model),
    "create_sampling_client(model_path)": lambda at: check(samples(at), at.service, at.sampler_path),
    "create_sampling_client(model_path=weights/…)": lambda at: check(samples(at), at.service, at.path),
    "create_sampling_client(record_stability_info)": lambda at: check(
        samples(at), at.service, base_model=at.base_model, record_stability_info=True
    ),
    "create_sampling_client(retry_config)": lambda at: check(
        samples(at), at.service, base_model=at.base_model, retry_config=RetryConfig()
    ),
    **{
        f"{method}{option}": recipe
        for method in ("create_training_client_from_state", "create_training_client_from_state_with_optimizer")
        for option, recipe in {
            "": lambda at: check(_is_of_rank_4, at.service, at.path),
            "(base_model)": lambda at: check(_is_of_rank_4, at.service, at.path, base_model=at.base_model),
            "(optimizer=AdamOptimizerConfig)": lambda at: check(
                _is_of_rank_4, at.service, at.path, optimizer=types.AdamOptimizerConfig()
            ),
            "(user_metadata)": lambda at: check(_is_of_rank_4, at.service, at.path, user_metadata=METADATA),
            "(weights_access_token)": lambda at: check(
                _is_of_rank_4, at.service, at.foreign_path, weights_access_token=at.foreign_key
            ),
        }.items()
    },
    "get_console_url": lambda at: call(at.service),
    "get_server_capabilities": lambda at: check(serves(at), at.service),
    "get_telemetry": lambda at: call(at.service),
    "holder": lambda at: call(at.service),
}


def _auth() -> Any:
    import tinker.auth

    return tinker.auth


AUTH: Mapping[str, Recipe] = {
    "get_tinker_token": lambda at: check(bool, _auth()),
    "raise_if_tinker_not_accessible": lambda at: call(_auth()),
    "tinker_has_credentials": lambda at: check(bool, _auth()),
}
