"""RestClient on a real server: it returns the same as the official SDK's for the same calls."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import ValidationError
from tinker.lib.public_interfaces.rest_client import RestClient as OfficialRestClient

from cotrain import AdamParams, Datum, Future, ModelInput, NotFoundError, RequestFailed, RestClient, ServiceClient
from cotrain.wire.rest import SessionSearchRequest
from tests.conformance.running import KEYS, Server
from tests.warm.popen import run

DATUM = Datum(
    model_input=ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0] * 3}
)
#: Keyword arguments of our `list_training_runs` that the official one does not have.
OURS_ALONE = {"tags", "text"}
OFFICIAL_SDK = """
import json, sys, tinker
rest = tinker.RestClient(base_url=sys.argv[1], api_key=sys.argv[2])
answers = [getattr(rest, name)(*given).result() for name, given in json.loads(sys.argv[3])]
print(json.dumps([answer.model_dump(mode="json") for answer in answers]))
"""
#: Methods that concern the client object, not the server.
NOT_OF_THE_SERVER = {"get_telemetry"}


@pytest.fixture(scope="module")
def service(server: Server) -> Iterator[ServiceClient]:
    with ServiceClient(server.address, KEYS[2], user_metadata={"made": "lists"}) as client:
        yield client


@pytest.fixture(scope="module")
def rest(service: ServiceClient) -> RestClient:
    return service.create_rest_client()


@pytest.fixture(scope="module")
def paths(service: ServiceClient, server: Server) -> list[str]:
    """A run's training checkpoint and its sampler weights."""
    run = service.create_lora_training_client(server.base_model, rank=2, seed=1)
    run.forward_backward([DATUM], "cross_entropy")
    run.optim_step(AdamParams())
    saved = run.save_state("kept"), run.save_weights_for_sampler("sampled")
    return [str(future.result().path) for future in saved]


@pytest.fixture(scope="module")
def run_id(paths: list[str]) -> str:
    return paths[0].split("/")[2]


def _methods(client: type) -> dict[str, list[str]]:
    """Return the parameters of each method, without the keyword-only ones of OURS_ALONE."""
    return {
        name: [
            parameter.name
            for parameter in inspect.signature(method).parameters.values()
            if parameter.name not in OURS_ALONE or parameter.kind is not parameter.KEYWORD_ONLY
        ]
        for name, method in inspect.getmembers(client, inspect.isfunction)
        if not name.startswith("_") and name not in NOT_OF_THE_SERVER
    }


def test_every_method_of_the_official_client_exists_with_its_arguments() -> None:
    ours = _methods(RestClient)
    for name, parameters in _methods(OfficialRestClient).items():
        assert ours[name] == parameters, name
        assert name.endswith("_async") or f"{name}_async" in ours


def test_both_clients_receive_the_same_answers(server: Server, rest: RestClient, paths: list[str], run_id: str) -> None:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    day = timedelta(days=1)
    calls: list[tuple[str, list[Any]]] = [
        ("get_server_capabilities", []),
        ("get_training_run", [run_id]),
        ("get_training_run_by_tinker_path", [paths[1]]),
        ("list_training_runs", [5, 0]),
        ("list_checkpoints", [run_id]),
        ("list_user_checkpoints", [1, 1]),
        ("get_weights_info_by_tinker_path", [paths[0]]),
        ("get_session", [run_id.partition(":")[0]]),
        ("list_sessions", [1]),
        ("get_billing_usage", [(hour - day).isoformat(), (hour + day).isoformat()]),
        ("get_current_checkpoint_storage_usage", []),
        ("get_audit_log", ["checkpoints"]),
    ]
    for (name, arguments), theirs in zip(calls, _official_answers(server, calls), strict=True):
        own = getattr(rest, name)(*arguments).result().model_dump(mode="json")
        assert _common(theirs, own) == theirs, name


def _official_answers(server: Server, calls: list[tuple[str, list[Any]]]) -> list[Any]:
    """Call the official SDK in a separate process, because it leaves its connections open."""
    program = [sys.executable, "-W", "ignore", "-c", OFFICIAL_SDK, server.address, KEYS[2]]
    done = run([*program, json.dumps(calls)])
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout)
    return answers


def _common(theirs: Any, own: Any) -> Any:
    """Return the part of our answer that the official client also has."""
    if isinstance(theirs, dict):
        return {name: _common(value, own.get(name)) for name, value in theirs.items()}
    if isinstance(theirs, list) and len(theirs) == len(own):
        return [_common(*pair) for pair in zip(theirs, own, strict=True)]
    return own


async def test_the_answers_can_be_awaited_once(rest: RestClient, run_id: str) -> None:
    asked = rest.list_training_run_ids_async(limit=1)
    assert isinstance(asked, Future)
    assert await asked == [run_id]
    run, runs = await asyncio.gather(rest.get_training_run(run_id), rest.list_training_runs_async())
    # A list does not search the log of each run.
    assert runs.training_runs[0] == run.model_copy(update={"rewind_from": None})
    assert asked.result() == [run_id]


def test_a_checkpoint_is_published_extended_copied_and_deleted(
    server: Server, rest: RestClient, paths: list[str]
) -> None:
    path = paths[1]
    copy = rest.copy_weights(path, "elsewhere", ttl_seconds=7200).result()
    stranger = RestClient(base_url=server.address, api_key=KEYS[3])
    with pytest.raises(NotFoundError):
        stranger.get_external_weights_urls(copy).result()
    rest.publish_checkpoint_from_tinker_path(copy).result()
    assert stranger.get_external_weights_urls(copy).result().urls
    rest.unpublish_checkpoint_from_tinker_path(copy).result()

    def expires_at() -> datetime | None:
        listed = rest.list_user_checkpoints().result().checkpoints
        return next(each.expires_at for each in listed if each.tinker_path == copy)

    assert expires_at() is not None
    rest.set_checkpoint_ttl_from_tinker_path(copy, None).result()
    assert expires_at() is None

    rest.delete_checkpoint(copy.split("/")[2], "sampler_weights/sampled").result()
    with pytest.raises(NotFoundError):
        rest.delete_checkpoint_from_tinker_path(copy).result()
    assert rest.get_external_weights_urls(path).result().urls


def test_links_open_without_a_key(rest: RestClient, paths: list[str], run_id: str) -> None:
    archive = rest.get_checkpoint_archive_url_from_tinker_path(paths[0]).result()
    assert archive.expires > datetime.now(UTC)
    with urllib.request.urlopen(archive.url) as opened:
        assert b"adapter_config.json" in opened.read()
    trace = rest.export_session_trace(run_id.partition(":")[0]).result()
    with urllib.request.urlopen(trace) as opened:
        assert b"forward_backward" in opened.read()


def test_sessions_are_found_and_assigned_to_projects(rest: RestClient, run_id: str) -> None:
    session = run_id.partition(":")[0]
    rest.assign_session_project(session, "a project").result()
    wanted = SessionSearchRequest(user_metadata={"made": "lists"}, project_ids=["a project"])
    [found] = rest.search_sessions(wanted).result().sessions
    assert (found.session_id, found.project_id) == (session, "a project")
    [listed] = rest.list_training_runs(project_id="a project").result().training_runs
    assert listed.training_run_id == run_id


def test_a_session_is_found_by_client_metadata_and_owns_its_copies(
    server: Server, rest: RestClient, paths: list[str]
) -> None:
    with ServiceClient(server.address, KEYS[2], project_id="copies", display_name="nightly copies") as copying:
        copy = copying.copy_weights(paths[0]).result()
        again = copying.create_training_client_from_state(copy, base_model=server.base_model)
        assert again.get_info().model_data.model_name == server.base_model
    wanted = SessionSearchRequest(display_name="nightly", project_ids=["copies"])
    [found] = rest.search_sessions(wanted).result().sessions
    assert copy.split("/")[2].startswith(found.session_id)


def test_usage_names_the_run_and_an_idle_session_has_no_timeline(server: Server, rest: RestClient, run_id: str) -> None:
    [used] = [each for each in rest.get_usage().result().sources if each.source == run_id]
    assert used.amounts.training_tokens == 3
    with ServiceClient(server.address, KEYS[2]) as idle:
        sampler = idle.create_sampling_client(base_model=server.base_model).sampler_id
        assert rest.get_sampler(sampler).result().base_model == server.base_model
        with pytest.raises(RequestFailed, match="None of the last"):
            rest.export_session_trace(sampler.partition(":")[0]).result()


def test_a_key_is_identified_by_its_tenant(server: Server, rest: RestClient) -> None:
    own = rest.whoami().result()
    assert own == RestClient(base_url=server.address, api_key=KEYS[2]).whoami().result()
    assert own.org_urn == f"tml:organization:{own.user_urn}"
    other = RestClient(base_url=server.address, api_key=KEYS[3]).whoami().result()
    assert other.user_urn != own.user_urn


def test_an_invalid_path_is_rejected_by_the_client(rest: RestClient) -> None:
    for path in ("x", "tinker://a/b", "tinker://a/else/b", "tinker://a/weights/b/c", "tinker:///w/"):
        with pytest.raises(ValueError, match=r"is not tinker://<run>/<kind>/<name>"):
            rest.get_training_run_by_tinker_path(path)


def test_a_run_is_created_with_a_note_and_tags_and_found_by_them(
    service: ServiceClient, rest: RestClient, server: Server
) -> None:
    run = service.create_lora_training_client(
        server.base_model, rank=2, note="the one with the longer warm-up", tags=["paper", "made"]
    )
    found = rest.list_training_runs(tags=["made"], text="warm-up longer").result()
    [shown] = found.training_runs
    assert (shown.training_run_id, shown.note) == (run.model_id, "the one with the longer warm-up")
    assert set(shown.tags) == {"paper", "made"}
    for wrong, field in (({"note": "x" * 2_001}, "note"), ({"tags": ["x" * 65]}, "tags")):
        with pytest.raises(ValidationError, match=field):
            service.create_lora_training_client(server.base_model, rank=2, **wrong)
