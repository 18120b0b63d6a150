"""Recipes of the clients of the REST API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from tinker import types

from tests.conformance.scoreboard.calls import Call, Recipe, call, check
from tests.conformance.scoreboard.place import PROJECT, Place
from tests.conformance.scoreboard.service_recipes import is_new_path, serves

EVERYTHING = {"limit": 1000, "offset": 0}
ACCESSIBLE = {"access_scope": "accessible"}


def billing(client_of: Callable[[Place], Any]) -> Mapping[str, Recipe]:
    """Return the recipes of an administrator's methods, for any client that has them."""
    return {
        "get_audit_log": lambda at: check(lambda answer: answer.entries, client_of(at)),
        "get_audit_log(day, event_type)": lambda at: check(
            lambda answer: answer.entries is not None,
            client_of(at),
            event_type="checkpoints",
            day=datetime.now(UTC).date(),
        ),
        "get_billing_usage": lambda at: check(lambda answer: answer.data, client_of(at), *_day()),
        "get_current_checkpoint_storage_usage": lambda at: check(lambda answer: answer.data, client_of(at)),
        "get_current_checkpoint_storage_usage(project_id)": lambda at: call(client_of(at), project_id=PROJECT),
        "get_telemetry": lambda at: call(client_of(at)),
    }


def _day() -> tuple[datetime, datetime]:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return hour - timedelta(hours=23), hour + timedelta(hours=1)


def _is_run(at: Place) -> Callable[[Any], bool]:
    run = at.run_id
    return lambda answer: run == answer.training_run_id


def _holds_run(at: Place) -> Callable[[Any], bool]:
    run = at.run_id
    return lambda answer: run in [each.training_run_id for each in answer.training_runs]


def _holds_path(at: Place) -> Callable[[Any], bool]:
    path = at.path
    return lambda answer: path in [each.tinker_path for each in answer.checkpoints]


def _is_session(at: Place) -> Callable[[Any], bool]:
    run = at.run_id
    return lambda answer: run in answer.training_run_ids


def _holds_session(at: Place) -> Callable[[Any], bool]:
    session = at.session_id
    return lambda answer: session in answer.sessions


def _is_identity(answer: Any) -> bool:
    return bool(answer.user_urn) and getattr(answer, "org_urn", True)


def _run_and_name(path: str) -> tuple[str, str]:
    run, _, name = path.removeprefix("tinker://").partition("/")
    return run, name


def _new_path(at: Place) -> str:
    return at.new_path()


def _published(at: Place) -> str:
    path = at.new_path()
    at.rest.publish_checkpoint_from_tinker_path(path).result()
    return path


def _afterwards(at: Place, path: str, is_so: Callable[[Any], bool], *args: Any) -> Call:
    """Call with a path and more arguments; afterwards `is_so` must hold for its entry in the list,
    or for None."""

    def holds(_: Any) -> bool:
        checkpoints = at.rest.list_checkpoints(at.run_id).result().checkpoints
        return is_so(next((each for each in checkpoints if each.tinker_path == path), None))

    return check(holds, at.rest, *args)


def _on_a_path(path_of: Callable[[Place], str], is_so: Callable[[Any], bool], *args: Any) -> Recipe:
    def recipe(at: Place) -> Call:
        path = path_of(at)
        return _afterwards(at, path, is_so, path, *args)

    return recipe


def _delete_by_name(at: Place) -> Call:
    path = at.new_path()
    return _afterwards(at, path, _is_gone, *_run_and_name(path))


def _is_gone(checkpoint: Any) -> bool:
    return checkpoint is None


def _of_project(at: Place) -> Call:
    at.rest.assign_session_project(at.session_id, PROJECT).result()
    return check(_holds_run(at), at.rest, **EVERYTHING, project_id=PROJECT)


LISTS: Mapping[str, Recipe] = {
    "get_session": lambda at: check(_is_session(at), at.rest, at.session_id),
    "get_session(access_scope)": lambda at: check(_is_session(at), at.rest, at.session_id, **ACCESSIBLE),
    "get_training_run": lambda at: check(_is_run(at), at.rest, at.run_id),
    "get_training_run(access_scope)": lambda at: check(_is_run(at), at.rest, at.run_id, **ACCESSIBLE),
    "get_training_run_by_tinker_path": lambda at: check(_is_run(at), at.rest, at.path),
    "get_training_run_by_tinker_path(access_scope)": lambda at: check(_is_run(at), at.rest, at.path, **ACCESSIBLE),
    "list_checkpoints": lambda at: check(_holds_path(at), at.rest, at.run_id),
    "list_sessions": lambda at: check(_holds_session(at), at.rest, **EVERYTHING),
    "list_sessions(access_scope)": lambda at: check(_holds_session(at), at.rest, **EVERYTHING, **ACCESSIBLE),
    "list_training_runs": lambda at: check(_holds_run(at), at.rest, **EVERYTHING),
    "list_training_runs(access_scope)": lambda at: check(_holds_run(at), at.rest, **EVERYTHING, **ACCESSIBLE),
    "list_training_runs(project_id)": _of_project,
    "list_user_checkpoints": lambda at: check(_holds_path(at), at.rest, **EVERYTHING),
    "search_sessions": lambda at: check(
        lambda answer: len(answer.sessions) == 1, at.rest, types.SessionSearchRequest(session_id=at.session_id)
    ),
}

REST: Mapping[str, Recipe] = {
    **billing(lambda at: at.rest),
    **LISTS,
    "assign_session_project": lambda at: call(at.rest, at.session_id, PROJECT),
    "copy_weights": lambda at: check(is_new_path(at), at.rest, at.path, PROJECT),
    "copy_weights(ttl_seconds)": lambda at: check(is_new_path(at), at.rest, at.path, PROJECT, ttl_seconds=3600),
    "copy_weights(weights_access_token)": lambda at: check(
        is_new_path(at), at.rest, at.foreign_path, PROJECT, weights_access_token=at.foreign_key
    ),
    "delete_checkpoint": _delete_by_name,
    "delete_checkpoint_from_tinker_path": _on_a_path(_new_path, _is_gone),
    "export_session_trace": lambda at: check(bool, at.rest, at.session_id),
    "get_checkpoint_archive_url": lambda at: check(lambda answer: answer.url, at.rest, *_run_and_name(at.sampler_path)),
    "get_checkpoint_archive_url_from_tinker_path": lambda at: check(
        lambda answer: answer.url, at.rest, at.sampler_path
    ),
    "get_external_weights_urls": lambda at: check(lambda answer: answer.urls, at.rest, at.external_path),
    "get_sampler": lambda at: check(lambda answer: answer.base_model == at.base_model, at.rest, at.sampler_id),
    "get_server_capabilities": lambda at: check(serves(at), at.rest),
    "get_weights_info_by_tinker_path": lambda at: check(lambda answer: answer.lora_rank == 4, at.rest, at.path),
    "publish_checkpoint_from_tinker_path": _on_a_path(_new_path, lambda each: each.public),
    "set_checkpoint_ttl_from_tinker_path": _on_a_path(_new_path, lambda each: each.expires_at is not None, 3600),
    "set_checkpoint_ttl_from_tinker_path(None)": _on_a_path(_new_path, lambda each: each.expires_at is None, None),
    "unpublish_checkpoint_from_tinker_path": _on_a_path(_published, lambda each: not each.public),
    "whoami": lambda at: check(_is_identity, at.rest),
    "whoami(where COTRAIN_JWT_AUTH=always)": lambda at: check(_is_identity, at.exchanging_rest),
}
