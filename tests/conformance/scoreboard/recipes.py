"""How each method is called: real arguments, and what must hold of the answer.

A method without a recipe comes out as "not tried", and so does an argument that no recipe passes. The
twin `x_async` is called like `x`, so one recipe serves both. Beside a method's own recipe stand those
of its options, as `method(option)`.
"""

from __future__ import annotations

from collections import ChainMap
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import torch
from tinker import types

from tests.conformance.scoreboard.calls import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.conformance.scoreboard.place import Place

    Recipe = Callable[[Place], Call]

CROSS_ENTROPY = "cross_entropy"
PROJECT = "a-project"
DAY_S = 86400


def call(on: Any, *args: Any, **options: Any) -> Call:
    """Call with these arguments; any answer will do."""
    return Call(on, args, options)


def check(holds: Callable[[Any], bool], on: Any, *args: Any, **options: Any) -> Call:
    """Call with these arguments; the answer must satisfy `holds`."""
    return Call(on, args, options, holds)


# ---- ServiceClient -------------------------------------------------------------------------------


def _is_of_rank_4(client: Any) -> bool:
    return bool(client.get_info().lora_rank == 4)


def _neg_ll(logprobs: Any, weights: Any) -> tuple[Any, dict[str, Any]]:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/neg_ll:sum": loss}


SERVICE: Mapping[str, Recipe] = {
    "close": lambda at: call(at.new_service(), "success"),
    "copy_weights": lambda at: check(lambda path: path != at.path, at.service, at.path),
    "create_custom_loss": lambda at: call(
        at.service, _neg_ll, input_ranks={"logprobs": 1, "weights": 1}
    ),
    "create_lora_training_client": lambda at: check(
        _is_of_rank_4, at.service, at.base_model, rank=4
    ),
    "create_lora_training_client(optimizer=DimuonOptimizerConfig)": lambda at: call(
        at.service, at.base_model, optimizer=types.DimuonOptimizerConfig()
    ),
    "create_rest_client": lambda at: call(at.service),
    "create_sampling_client": lambda at: call(at.service, base_model=at.base_model),
    "create_sampling_client(model_path)": lambda at: call(at.service, at.sampler_path),
    "create_sampling_client(model_path=weights/…)": lambda at: call(at.service, at.path),
    "create_sampling_client(record_stability_info)": lambda at: check(
        _samples(at), at.service, base_model=at.base_model, record_stability_info=True
    ),
    "create_training_client_from_state": lambda at: check(_is_of_rank_4, at.service, at.path),
    "create_training_client_from_state_with_optimizer": lambda at: check(
        _is_of_rank_4, at.service, at.path
    ),
    "get_console_url": lambda at: call(at.service),
    "get_server_capabilities": lambda at: check(
        lambda answer: _serves(answer, at.base_model), at.service
    ),
    "get_telemetry": lambda at: call(at.service),
    "holder": lambda at: call(at.service),
}


def _samples(at: Place) -> Callable[[Any], bool]:
    return lambda sampler: bool(sampler.sample(at.prompt, 1, at.params).result().sequences)


def _serves(answer: Any, base_model: str) -> bool:
    return base_model in [model.model_name for model in answer.supported_models]


# ---- TrainingClient ------------------------------------------------------------------------------


def _sum_of_squares(_: Any, rows: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return torch.stack([(row**2).sum() for row in rows]).sum(), {}


def _loss_handle(at: Place) -> Any:
    ranks = {"logprobs": 1, "weights": 1}
    return at.service.create_custom_loss(_neg_ll, input_ranks=ranks).result()


def training(run_of: Callable[[Place], Any]) -> Mapping[str, Recipe]:
    """How a training client is called, be it the client or the promise of one."""
    return {
        "create_sampling_client": lambda at: call(run_of(at), at.sampler_path),
        "forward": lambda at: check(_has_loss, run_of(at), at.data, CROSS_ENTROPY),
        "forward_backward": lambda at: check(_has_loss, run_of(at), at.data, CROSS_ENTROPY),
        "forward_backward(loss_fn='stable_reinforce')": lambda at: call(
            run_of(at), at.data, "stable_reinforce"
        ),
        "forward_backward_custom": lambda at: check(
            _has_loss, run_of(at), at.data, _sum_of_squares
        ),
        "forward_backward_custom(LossHandle)": lambda at: check(
            _has_loss, run_of(at), at.data, _loss_handle(at)
        ),
        "get_console_url": lambda at: call(run_of(at)),
        "get_info": lambda at: check(lambda info: info.lora_rank == 4, run_of(at)),
        "get_telemetry": lambda at: call(run_of(at)),
        "get_tokenizer": lambda at: check(lambda tokenizer: tokenizer.encode("a"), run_of(at)),
        "load_state": lambda at: call(run_of(at), at.path),
        "load_state_with_optimizer": lambda at: call(run_of(at), at.path),
        "optim_step": lambda at: call(run_of(at), at.adam),
        "optim_step(DimuonParams)": lambda at: call(
            run_of(at), types.DimuonParams(learning_rate=1e-3)
        ),
        "save_state": lambda at: check(_has_path, run_of(at), at.new_name()),
        "save_state(ttl_seconds)": lambda at: check(
            _has_path, run_of(at), at.new_name(), ttl_seconds=3600
        ),
        "save_state(overwrite)": lambda at: check(
            _has_path, run_of(at), at.path.rpartition("/")[2], overwrite=True
        ),
        "save_state(user_metadata)": lambda at: check(
            _has_path, run_of(at), at.new_name(), user_metadata={"a": "b"}
        ),
        "save_weights_and_get_sampling_client": lambda at: check(_samples(at), run_of(at)),
        "save_weights_and_get_sampling_client(kind='inflight')": lambda at: check(
            _samples(at), run_of(at), kind="inflight"
        ),
        "save_weights_external": lambda at: check(_has_path, run_of(at), at.new_name()),
        "save_weights_external(age_encryption_recipients)": lambda at: check(
            _has_path, run_of(at), at.new_name(), age_encryption_recipients=[_new_recipient()]
        ),
        "save_weights_for_sampler": lambda at: check(_has_path, run_of(at), at.new_name()),
        "save_weights_for_sampler(ttl_seconds)": lambda at: check(
            _has_path, run_of(at), at.new_name(), ttl_seconds=3600
        ),
        "save_weights_for_sampler(user_metadata)": lambda at: check(
            _has_path, run_of(at), at.new_name(), user_metadata={"a": "b"}
        ),
    }


def _has_loss(output: Any) -> bool:
    return "loss:sum" in output.metrics


def _has_path(answer: Any) -> bool:
    return bool(answer.path.startswith("tinker://"))


def _new_recipient() -> str:
    import pyrage

    return str(pyrage.x25519.Identity.generate().to_public())


# ---- SamplingClient ------------------------------------------------------------------------------


def sampling(sampler_of: Callable[[Place], Any]) -> Mapping[str, Recipe]:
    """How a sampling client is called, be it the client or the promise of one."""
    return {
        "compute_logprobs": lambda at: check(
            lambda row: len(row) == at.prompt.length, sampler_of(at), at.prompt
        ),
        "compute_logprobs(prompt_logprobs_last_n)": lambda at: check(
            lambda row: row[-1] is not None, sampler_of(at), at.prompt, prompt_logprobs_last_n=2
        ),
        "create": lambda at: call(sampler_of(at), at.service.holder, base_model=at.base_model),
        "from_sampler_handle": lambda at: check(
            _samples(at), sampler_of(at), at.sampler.get_sampler_handle()
        ),
        "get_base_model": lambda at: check(lambda name: name == at.base_model, sampler_of(at)),
        "get_sampler_handle": lambda at: call(sampler_of(at)),
        "get_telemetry": lambda at: call(sampler_of(at)),
        "get_tokenizer": lambda at: check(lambda tokenizer: tokenizer.encode("a"), sampler_of(at)),
        "on_queue_state_change": lambda at: call(sampler_of(at), _active(), None),
        "sample": lambda at: check(_sampled, sampler_of(at), at.prompt, 1, at.params),
        "sample(include_prompt_logprobs)": lambda at: check(
            lambda answer: answer.prompt_logprobs,
            *(sampler_of(at), at.prompt, 1, at.params),
            include_prompt_logprobs=True,
        ),
        "sample(topk_prompt_logprobs)": lambda at: check(
            lambda answer: answer.topk_prompt_logprobs,
            *(sampler_of(at), at.prompt, 1, at.params),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=2,
        ),
        "sample(topk_sample_logprobs)": lambda at: check(
            lambda answer: answer.sequences[0].topk_logprobs,
            *(sampler_of(at), at.prompt, 1, at.params),
            topk_sample_logprobs=2,
        ),
        "sample(target_prompt_logprobs)": lambda at: check(
            lambda answer: answer.target_prompt_logprobs,
            *(sampler_of(at), at.prompt, 1, at.params),
            target_prompt_logprobs=types.TensorData.from_torch(torch.tensor([[1]] * 4)),
        ),
        "sample(prompt_logprobs_last_n)": lambda at: check(
            lambda answer: answer.prompt_logprobs[-1] is not None,
            *(sampler_of(at), at.prompt, 1, at.params),
            include_prompt_logprobs=True,
            prompt_logprobs_last_n=2,
        ),
        "sample(prompt_alt_tokens_k)": lambda at: check(
            _sampled, sampler_of(at), at.prompt, 1, at.params, prompt_alt_tokens_k=2
        ),
    }


def _sampled(answer: Any) -> bool:
    return len(answer.sequences[0].tokens) == 4


def _active() -> Any:
    from tinker.lib.api_future_impl import QueueState

    return QueueState.ACTIVE


# ---- RestClient and AdminClient ------------------------------------------------------------------


def _hour() -> datetime:
    return datetime.now(UTC).replace(minute=0, second=0, microsecond=0)


def billing(client_of: Callable[[Place], Any]) -> Mapping[str, Recipe]:
    """What an administrator asks, of whichever client offers it."""
    return {
        "get_audit_log": lambda at: call(client_of(at)),
        "get_audit_log(event_type, day)": lambda at: call(
            client_of(at), event_type="checkpoints", day=datetime.now(UTC).date()
        ),
        "get_billing_usage": lambda at: call(
            client_of(at), _hour() - timedelta(days=1), _hour() + timedelta(hours=1)
        ),
        "get_current_checkpoint_storage_usage": lambda at: call(client_of(at)),
        "get_current_checkpoint_storage_usage(project_id)": lambda at: call(client_of(at), PROJECT),
        "get_telemetry": lambda at: call(client_of(at)),
    }


def _own_run(at: Place) -> Callable[[Any], bool]:
    run = at.run_id
    return lambda answer: run == answer.training_run_id


def _holds_run(at: Place) -> Callable[[Any], bool]:
    run = at.run_id
    return lambda answer: run in [each.training_run_id for each in answer.training_runs]


def _holds_path(at: Place) -> Callable[[Any], bool]:
    path = at.path
    return lambda answer: path in [each.tinker_path for each in answer.checkpoints]


def _holds_session(at: Place) -> Callable[[Any], bool]:
    session = at.session_id
    return lambda answer: session in answer.sessions


def _run_and_name(path: str) -> tuple[str, str]:
    run, _, name = path.removeprefix("tinker://").partition("/")
    return run, name


REST: Mapping[str, Recipe] = ChainMap(
    {
        "assign_session_project": lambda at: call(at.rest, at.session_id, PROJECT),
        "copy_weights": lambda at: check(lambda path: path != at.path, at.rest, at.path, PROJECT),
        "delete_checkpoint": lambda at: call(at.rest, *_run_and_name(at.new_path())),
        "delete_checkpoint_from_tinker_path": lambda at: call(at.rest, at.new_path()),
        "export_session_trace": lambda at: call(at.rest, at.session_id),
        "get_checkpoint_archive_url": lambda at: call(at.rest, *_run_and_name(at.sampler_path)),
        "get_checkpoint_archive_url_from_tinker_path": lambda at: call(at.rest, at.sampler_path),
        "get_external_weights_urls": lambda at: check(
            lambda answer: answer.urls, at.rest, at.external_path
        ),
        "get_sampler": lambda at: check(
            lambda answer: answer.base_model == at.base_model, at.rest, at.sampler_id
        ),
        "get_server_capabilities": lambda at: check(
            lambda answer: _serves(answer, at.base_model), at.rest
        ),
        "get_session": lambda at: check(
            lambda answer: at.run_id in answer.training_run_ids, at.rest, at.session_id
        ),
        "get_training_run": lambda at: check(_own_run(at), at.rest, at.run_id),
        "get_training_run(access_scope)": lambda at: check(
            _own_run(at), at.rest, at.run_id, access_scope="accessible"
        ),
        "get_training_run_by_tinker_path": lambda at: check(_own_run(at), at.rest, at.path),
        "get_weights_info_by_tinker_path": lambda at: check(
            lambda answer: answer.lora_rank == 4, at.rest, at.path
        ),
        "list_checkpoints": lambda at: check(_holds_path(at), at.rest, at.run_id),
        "list_sessions": lambda at: check(_holds_session(at), at.rest, limit=100),
        "list_training_runs": lambda at: check(_holds_run(at), at.rest, limit=100),
        "list_training_runs(project_id)": lambda at: call(at.rest, project_id=PROJECT),
        "list_user_checkpoints": lambda at: check(_holds_path(at), at.rest, limit=100),
        "publish_checkpoint_from_tinker_path": lambda at: call(at.rest, at.new_path()),
        "search_sessions": lambda at: call(at.rest, _search(at)),
        "set_checkpoint_ttl_from_tinker_path": lambda at: call(at.rest, at.new_path(), 3600),
        "set_checkpoint_ttl_from_tinker_path(None)": lambda at: call(at.rest, at.new_path(), None),
        "unpublish_checkpoint_from_tinker_path": lambda at: call(at.rest, _published(at)),
        "whoami": lambda at: check(
            lambda answer: answer.user_urn and answer.org_urn, at.rest_of_a_jwt
        ),
        "whoami(of a tml- key)": lambda at: call(at.rest),
    },
    dict(billing(lambda at: at.rest)),
)


def _search(at: Place) -> Any:
    return types.SessionSearchRequest(session_id=at.session_id)


def _published(at: Place) -> str:
    path = at.new_path()
    at.rest.publish_checkpoint_from_tinker_path(path).result()
    return path


# ---- The rest ------------------------------------------------------------------------------------


def future(future_of: Callable[[Place], Any]) -> Mapping[str, Recipe]:
    """How a promise is waited for."""
    return {
        "coroutine": lambda at: call(future_of(at)),
        "future": lambda at: call(future_of(at)),
        "result": lambda at: call(future_of(at)),
        "result(timeout)": lambda at: call(future_of(at), timeout=60.0),
    }


RECIPES: Mapping[str, Mapping[str, Recipe]] = {
    "APIFuture": future(lambda at: at.run.forward(at.data, CROSS_ENTROPY)),
    "AdminClient": billing(lambda at: at.admin),
    "BackcompatSamplingClientFuture": {
        **sampling(lambda at: at.pending_sampler()),
        **future(lambda at: at.pending_sampler()),
    },
    "BackcompatTrainingClientFuture": {
        **training(lambda at: at.pending_run()),
        **future(lambda at: at.pending_run()),
    },
    "LossHandle": {
        "input_names": lambda at: call(_loss_handle(at)),
        "key": lambda at: call(_loss_handle(at)),
    },
    "RestClient": REST,
    "SamplingClient": sampling(lambda at: at.sampler),
    "ServiceClient": SERVICE,
    "TrainingClient": training(lambda at: at.run),
    "auth": {
        "get_tinker_token": lambda at: check(bool, _auth()),
        "raise_if_tinker_not_accessible": lambda at: call(_auth()),
        "tinker_has_credentials": lambda at: check(bool, _auth()),
    },
}


def _auth() -> Any:
    import tinker.auth

    return tinker.auth
