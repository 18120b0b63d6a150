"""Checkpoints of an account: uploads, downloads, and rules of retention."""

from __future__ import annotations

import io
import json
import tarfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from cotrain import BadRequestError, NotFoundError, RequestFailed, ServiceClient
from cotrain.clients.checkpoints import PAGE
from cotrain.clients.retention import Rule, rules_of, superfluous
from cotrain.errors import APIConnectionError, MalformedMessage, UnsupportedInput
from cotrain.transport.responses import RetryPolicy
from cotrain.wire.rest import Checkpoint
from tests.support.fake_api import Answer, refusal
from tests.support.fake_checkpoints import FakeCheckpoints

PATH = "tinker://s1:train:0/weights/a b"
URL = "training_runs/s1%3Atrain%3A0/checkpoints/weights/a%20b"


@pytest.fixture
def api() -> FakeCheckpoints:
    return FakeCheckpoints()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x" * 3_000_000)
    (tmp_path / "training_args.bin").write_bytes(b"pickled")
    return tmp_path


def test_only_the_two_adapter_files_of_a_folder_are_uploaded(
    api: FakeCheckpoints, service: ServiceClient, folder: Path
) -> None:
    reported: list[tuple[int, int]] = []
    path = service.upload_checkpoint(
        folder, "m", "mine", ttl_seconds=3600, user_metadata={"a": "b"}, progress=lambda *sent: reported.append(sent)
    )
    assert path == "tinker://s1:train:0/weights/mine"
    ((query, body),) = api.uploads
    assert query == {
        "base_model": "m",
        "name": "mine",
        "session_id": "s1",
        "model_seq_id": "0",
        "ttl_seconds": "3600",
        "user_metadata": '{"a": "b"}',
    }
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        names = archive.getnames()
        sent = archive.extractfile("adapter_model.safetensors")
        assert sent is not None
        assert sent.read() == b"x" * 3_000_000
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    assert reported[-1] == (len(body), len(body))
    assert [done for done, _ in reported] == sorted({done for done, _ in reported})


def test_an_archive_is_uploaded_unchanged(api: FakeCheckpoints, service: ServiceClient, tmp_path: Path) -> None:
    archive = tmp_path / "a.zip"
    archive.write_bytes(b"PK whatever")
    service.upload_checkpoint(archive, "m", "mine")
    assert api.uploads[0][1] == b"PK whatever"


def test_an_upload_with_a_lost_answer_is_repeated_with_the_same_number(
    api: FakeCheckpoints, service: ServiceClient, folder: Path
) -> None:
    service._transport.policy = RetryPolicy(first_delay_s=0.001)
    api.answers["training_runs/upload"] = [httpx.ReadError("lost"), refusal(429), refusal(503)]
    service.upload_checkpoint(folder, "m", "mine")
    sent = [call for call in api.calls if call.url.path.endswith("upload")]
    assert len(sent) == 4
    assert len({(str(call.url), call.content) for call in sent}) == 1


def test_each_upload_and_each_run_gets_its_own_number(
    api: FakeCheckpoints, service: ServiceClient, folder: Path
) -> None:
    service.create_lora_training_client("m")
    service.upload_checkpoint(folder, "m", "mine")
    service.create_training_client_from_state(PATH)
    assert api.uploads[0][0]["model_seq_id"] == "1"
    assert api.bodies("load_weights")[0]["model_seq_id"] == 2


def test_the_error_says_why_an_adapter_does_not_fit(api: FakeCheckpoints, service: ServiceClient, folder: Path) -> None:
    api.failures = {"s1:train:0:0": "too wide", "s1:train:0:1": "nothing to save"}
    with pytest.raises(RequestFailed, match="too wide"):
        service.upload_checkpoint(folder, "m", "mine")
    api.answers["training_runs/upload"] = [refusal(400, "a bad member")]
    with pytest.raises(BadRequestError, match="a bad member"):
        service.upload_checkpoint(folder, "m", "mine")


def test_a_folder_without_an_adapter_is_not_uploaded(
    api: FakeCheckpoints, service: ServiceClient, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match=r" has no adapter_config\.json: give the folder of a PEFT adapter"):
        service.upload_checkpoint(tmp_path, "m", "mine")
    assert not api.calls


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model-00001-of-00002.safetensors"])
def test_a_folder_with_another_weight_format_is_not_uploaded(
    api: FakeCheckpoints, service: ServiceClient, tmp_path: Path, name: str
) -> None:
    for each in ("adapter_config.json", name):
        (tmp_path / each).write_text("{}")
    with pytest.raises(UnsupportedInput, match=rf"Only safetensors checkpoints .* holds {name}"):
        service.upload_checkpoint(tmp_path, "m", "mine")
    assert not api.calls


def test_a_list_has_the_length_of_all_its_pages(api: FakeCheckpoints, service: ServiceClient) -> None:
    assert service.list_checkpoints() == []
    api.paths_stored = [f"tinker://r/weights/{number}" for number in range(2 * PAGE + 1)]
    assert [each.tinker_path for each in service.list_checkpoints()] == api.paths_stored


def test_a_checkpoint_is_deleted_by_its_path(api: FakeCheckpoints, service: ServiceClient) -> None:
    service.delete_checkpoint(PATH)
    (call,) = api.calls
    assert (call.method, call.url.raw_path.decode()) == ("DELETE", f"/api/v1/{URL}")


@pytest.mark.parametrize("path", ["", "a", "tinker://a/b", "tinker://a/b/c/d", "http://a/b/c"])
def test_an_invalid_path_is_not_requested(api: FakeCheckpoints, service: ServiceClient, path: str) -> None:
    with pytest.raises(ValueError, match="is not tinker://"):
        service.delete_checkpoint(path)
    assert not api.calls


def test_a_download_is_complete_and_needs_no_key(api: FakeCheckpoints, service: ServiceClient, tmp_path: Path) -> None:
    api.files = {"adapter_model.safetensors": b"t" * 2_000_000, "adapter_config.json": b"{}"}
    reported: list[tuple[int, int]] = []
    folder = tmp_path / "a" / "b"
    service.download_checkpoint(PATH, folder, lambda *sent: reported.append(sent))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == api.files
    assert reported[0] == (2, 2_000_002)
    assert reported[-1] == (2_000_002, 2_000_002)
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    asked, *fetched = api.calls
    assert asked.url.raw_path.decode() == f"/api/v1/{URL}/external_weights_urls"
    assert "x-api-key" in asked.headers
    assert not any("x-api-key" in call.headers for call in fetched)


def test_without_progress_no_sizes_are_requested(api: FakeCheckpoints, service: ServiceClient, tmp_path: Path) -> None:
    api.files = {"adapter_config.json": b"{}"}
    service.download_checkpoint(PATH, tmp_path)
    assert len(api.calls) == 2


@pytest.mark.parametrize(
    ("answer", "total"),
    [
        (httpx.Response(206, content=b"{", headers={"Content-Range": "bytes 0-0/2"}), 2),
        (httpx.Response(206, content=b"{", headers={"Content-Range": "bytes 0-0/*"}), 0),
        (refusal(404, "gone"), 0),
        (httpx.ReadError("broken"), 0),
    ],
)
def test_an_unknown_size_is_0_and_does_not_stop_a_download(
    api: FakeCheckpoints, service: ServiceClient, tmp_path: Path, answer: Answer, total: int
) -> None:
    api.files = {"adapter_config.json": b"{}"}
    api.answers["/adapter_config.json"] = [answer]
    reported: list[tuple[int, int]] = []
    service.download_checkpoint(PATH, tmp_path, lambda *sent: reported.append(sent))
    assert reported == [(2, total)]


def test_a_broken_download_leaves_no_file(api: FakeCheckpoints, service: ServiceClient, tmp_path: Path) -> None:
    api.files = {"a.json": b"t"}
    service._transport.policy = RetryPolicy(give_up_after_s=-1.0)
    api.answers["/a.json"] = [refusal(404), httpx.ReadError("broken")]
    with pytest.raises(NotFoundError):
        service.download_checkpoint(PATH, tmp_path)
    with pytest.raises(APIConnectionError):
        service.download_checkpoint(PATH, tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name",
    [
        *("", "..", "../x.json", "a/b.json", "a\\b.json", "/etc/passwd", "a.json\n", "a\x1b[2J.json"),
        *(".bashrc", ".x.json", "Makefile", "conftest.py", f"{'x' * 300}.json"),
    ],
)
def test_a_server_cannot_choose_where_a_download_is_written(
    api: FakeCheckpoints, service: ServiceClient, tmp_path: Path, name: str
) -> None:
    api.files = {name: b"t"}
    with pytest.raises(MalformedMessage):
        service.download_checkpoint(PATH, tmp_path / "in")
    assert not any((tmp_path / "in").iterdir())


def test_a_run_continues_from_a_checkpoint(api: FakeCheckpoints, service: ServiceClient) -> None:
    run = service.create_training_client_from_state(PATH, user_metadata={"a": "b"})
    also = service.create_training_client_from_state_with_optimizer(PATH)
    assert (run.model_id, also.model_id) == ("s1:train:0", "s1:train:0")
    first, second = api.bodies("load_weights")
    assert first == {
        "path": PATH,
        "optimizer": False,
        "type": "load_weights",
        "session_id": "s1",
        "model_seq_id": 0,
        "user_metadata": {"a": "b"},
    }
    assert second["optimizer"] is True


def test_saves_and_loads_are_numbered_in_the_order_of_the_calls(api: FakeCheckpoints, service: ServiceClient) -> None:
    run = service.create_lora_training_client("m")
    saved = run.save_state("a", 3600, overwrite=True, user_metadata={"k": "v"})
    run.optim_step()
    run.load_state(PATH)
    loaded = run.load_state_with_optimizer(PATH)
    unnamed = run.save_state()
    assert saved.result().path == "tinker://s1:train:0/weights/a"
    assert loaded.result().path == "tinker://x/weights/a"
    unnamed.result()
    first, second = api.bodies("save_weights")
    assert first == {
        "model_id": "s1:train:0",
        "seq_id": 1,
        "path": "a",
        "ttl_seconds": 3600,
        "overwrite": True,
        "user_metadata": {"k": "v"},
        "type": "save_weights",
    }
    assert "path" not in second
    assert second["seq_id"] == 5
    loads = sorted(api.bodies("load_weights"), key=lambda body: int(body["seq_id"]))
    assert [(body["seq_id"], body["optimizer"]) for body in loads] == [(3, False), (4, True)]
    assert json.dumps(loads).count(PATH) == 2


async def test_every_method_of_a_run_works_in_an_event_loop_too(service: ServiceClient) -> None:
    run = await service.create_training_client_from_state_async(PATH)
    await service.create_training_client_from_state_with_optimizer_async(PATH)
    saved = await run.save_state_async("a")
    loaded = await run.load_state_async(PATH)
    again = await run.load_state_with_optimizer_async(PATH)
    assert (await saved).path == "tinker://s1:train:0/weights/a"
    assert {(await loaded).path, (await again).path} == {"tinker://x/weights/a"}


NOW = datetime(2026, 1, 1, tzinfo=UTC)


def checkpoint(age: int, **changes: object) -> Checkpoint:
    fields = {
        "checkpoint_id": f"weights/{age}", "checkpoint_type": "training",
        "tinker_path": f"tinker://r/weights/{age}", "time": NOW - timedelta(days=age), **changes,
    }  # fmt: skip
    return Checkpoint.model_validate(fields)


def test_a_text_is_a_list_of_rules() -> None:
    assert rules_of("last:3, best:eval/nll:2,highest:reward:1") == [
        Rule(3), Rule(2, "eval/nll"), Rule(1, "reward", is_highest=True),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "last", "last:0", "best:2", "last:1,", "worst:a:1", "best::1"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedInput, match="is no rule"):
        rules_of(text)


def test_what_no_rule_keeps_is_superfluous() -> None:
    kept = [
        checkpoint(0), checkpoint(1), checkpoint(2, metrics={"loss": 1.0}),
        checkpoint(4, public=True), checkpoint(5, expires_at=NOW),
        checkpoint(6, checkpoint_type="sampler"), checkpoint(7, metrics={"loss": 1.5}),
    ]  # fmt: skip
    doomed = [checkpoint(3, metrics={"loss": 2.0}), checkpoint(8)]
    assert superfluous([*reversed(kept), *doomed], rules_of("last:2, best:loss:2")) == doomed
    assert superfluous(kept[:1], rules_of("highest:loss:1")) == []
