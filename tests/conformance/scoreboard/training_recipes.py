"""Recipes of a training client and of its promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyrage
import torch
from tinker import types
from tinker.lib.retry_handler import RetryConfig

from tests.conformance.scoreboard.calls import Recipe, call, check
from tests.conformance.scoreboard.place import Place
from tests.conformance.scoreboard.service_recipes import METADATA, samples

CROSS_ENTROPY = "cross_entropy"
CLIP = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}
SSH_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHsKLqeplhpW+uObz5dvMgjz1OxfM/XXUB+VHtZ6isGN"


def _sum_of_squares(_: Any, rows: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return torch.stack([(row**2).sum() for row in rows]).sum(), {}


def _has_loss(output: Any) -> bool:
    return "loss:sum" in output.metrics


def _has_path(answer: Any) -> bool:
    return bool(answer.path.startswith("tinker://"))


def _recipient() -> str:
    return str(pyrage.x25519.Identity.generate().to_public())


def training(run_of: Callable[[Place], Any]) -> Mapping[str, Recipe]:
    """Return the recipes of all methods of a training client."""
    return {
        **_passes(run_of),
        **_saves(run_of),
        **_samplers(run_of),
        "get_console_url": lambda at: call(run_of(at)),
        "get_info": lambda at: check(lambda info: info.lora_rank == 4, run_of(at)),
        "get_telemetry": lambda at: call(run_of(at)),
        "get_tokenizer": lambda at: check(lambda tokenizer: tokenizer.encode("a"), run_of(at)),
        "optim_step": lambda at: call(run_of(at), at.adam),
        "optim_step(adam_params)": lambda at: call(run_of(at), adam_params=at.adam),
        "optim_step(DimuonParams)": lambda at: call(run_of(at), types.DimuonParams(learning_rate=1e-3)),
    }


def _passes(run_of: Callable[[Place], Any]) -> Mapping[str, Recipe]:
    return {
        "forward": lambda at: check(_has_loss, run_of(at), at.data, CROSS_ENTROPY),
        "forward(loss_fn_config)": lambda at: check(_has_loss, run_of(at), at.policy_data, "ppo", loss_fn_config=CLIP),
        "forward_backward": lambda at: check(_has_loss, run_of(at), at.data, CROSS_ENTROPY),
        "forward_backward(loss_fn_config)": lambda at: check(
            _has_loss, run_of(at), at.policy_data, "ppo", loss_fn_config=CLIP
        ),
        "forward_backward(loss_fn='stable_reinforce')": lambda at: check(
            _has_loss, run_of(at), at.policy_data, "stable_reinforce"
        ),
        "forward_backward_custom": lambda at: check(_has_loss, run_of(at), at.data, _sum_of_squares),
        "forward_backward_custom(LossHandle)": lambda at: check(_has_loss, run_of(at), at.data, at.loss_handle),
        "forward_backward_custom(loss_type_input)": lambda at: check(
            _has_loss, run_of(at), at.data, _sum_of_squares, loss_type_input="logprobs"
        ),
    }


def _saves(run_of: Callable[[Place], Any]) -> Mapping[str, Recipe]:
    return {
        "load_state": lambda at: call(run_of(at), at.path),
        "load_state(weights_access_token)": lambda at: call(
            run_of(at), at.foreign_path, weights_access_token=at.foreign_key
        ),
        "load_state_with_optimizer": lambda at: call(run_of(at), at.path),
        "load_state_with_optimizer(weights_access_token)": lambda at: call(
            run_of(at), at.foreign_path, weights_access_token=at.foreign_key
        ),
        "save_state": lambda at: check(_has_path, run_of(at), at.new_name()),
        "save_state(overwrite)": lambda at: check(_has_path, run_of(at), at.path.rpartition("/")[2], overwrite=True),
        "save_state(ttl_seconds)": lambda at: check(_has_path, run_of(at), at.new_name(), ttl_seconds=3600),
        "save_state(user_metadata)": lambda at: check(_has_path, run_of(at), at.new_name(), user_metadata=METADATA),
        "save_weights_external": lambda at: check(_has_path, run_of(at), at.new_name()),
        "save_weights_external(age_encryption_recipients=age1…)": lambda at: check(
            _has_path, run_of(at), at.new_name(), age_encryption_recipients=[_recipient()]
        ),
        "save_weights_external(age_encryption_recipients=ssh-…)": lambda at: check(
            _has_path, run_of(at), at.new_name(), age_encryption_recipients=[SSH_KEY]
        ),
        "save_weights_external(ttl_seconds)": lambda at: check(_has_path, run_of(at), at.new_name(), ttl_seconds=3600),
        "save_weights_for_sampler": lambda at: check(_has_path, run_of(at), at.new_name()),
        "save_weights_for_sampler(ttl_seconds)": lambda at: check(
            _has_path, run_of(at), at.new_name(), ttl_seconds=3600
        ),
        "save_weights_for_sampler(user_metadata)": lambda at: check(
            _has_path, run_of(at), at.new_name(), user_metadata=METADATA
        ),
    }


def _samplers(run_of: Callable[[Place], Any]) -> Mapping[str, Recipe]:
    return {
        "create_sampling_client": lambda at: check(samples(at), run_of(at), at.sampler_path),
        "create_sampling_client(record_stability_info)": lambda at: check(
            samples(at), run_of(at), at.sampler_path, record_stability_info=True
        ),
        "create_sampling_client(retry_config)": lambda at: check(
            samples(at), run_of(at), at.sampler_path, retry_config=RetryConfig()
        ),
        "save_weights_and_get_sampling_client": lambda at: check(samples(at), run_of(at)),
        "save_weights_and_get_sampling_client(kind='inflight')": lambda at: check(
            samples(at), run_of(at), kind="inflight"
        ),
        "save_weights_and_get_sampling_client(name, retry_config)": lambda at: check(
            samples(at), run_of(at), name=at.new_name(), retry_config=RetryConfig()
        ),
        "save_weights_and_get_sampling_client(record_stability_info)": lambda at: check(
            samples(at), run_of(at), record_stability_info=True
        ),
    }
