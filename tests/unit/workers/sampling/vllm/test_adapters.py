"""Adapters on a vLLM server: loaded on request, unloaded at the limit, and copied to this host."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cotrain_store.blobs.folder import Folder
from cotrain_workers.checkpoints.peft_folder import CONFIG, TENSORS, FolderUnreadable, key_of, read_folder, write_folder
from cotrain_workers.engine.ops import HostWeights, WeightsMissing
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.sampling.vllm import decoder as vllm_sampler
from cotrain_workers.sampling.vllm.adapters import AdapterCopies
from cotrain_workers.sampling.vllm.decoder import VllmDecoder
from tests.support.fake_vllm import FakeVllm
from tests.support.saved_files import layout_of
from tests.support.vllm_requests import Trained, finish, request, run, steps, tokens

NewDecoder = Callable[..., VllmDecoder]


def test_requests_over_many_adapters_finish_with_two_at_once(
    new_decoder: NewDecoder, vllm: FakeVllm, trained: Trained
) -> None:
    requests = [request(f"r{n}", [*trained.folders, None][n % 6], num_samples=1 + n % 3) for n in range(12)]
    decoder = new_decoder(max_adapters=2, max_sequences=8)
    outputs = run(decoder, *requests)
    assert {name: len(tokens(output)) for name, output in outputs.items()} == {
        each.id: each.num_samples for each in requests
    }
    assert vllm.most_loaded == 2
    assert vllm.pulled == []
    assert vllm.max_generating <= 8
    names = {body["lora_name"] for body in vllm.bodies("/v1/load_lora_adapter")}
    assert {path.name for path in trained.folders.values()} < names  # and those of the startup check


def test_an_adapter_in_use_stays_until_its_last_sequence_ends(new_decoder: NewDecoder, vllm: FakeVllm) -> None:
    decoder = new_decoder(max_adapters=1)
    run(decoder, request("warm"))
    vllm.may_generate.clear()
    decoder.add(request("one", "run-1"))
    vllm.wait_until(generating=1)
    decoder.add(request("two", "run-2"))
    decoder.add(request("three", "run-1"))  # not earlier: otherwise "two" might wait forever
    for _, step in zip(range(100), steps(decoder), strict=False):
        assert not step.finished
    assert vllm.generating == 1
    vllm.may_generate.set()
    assert finish(decoder).keys() == {"one", "two", "three"}
    assert vllm.pulled == []
    assert vllm.most_loaded == 1


def test_an_adapter_lost_by_the_server_is_loaded_again(
    new_decoder: NewDecoder, vllm: FakeVllm, trained: Trained
) -> None:
    decoder = new_decoder()
    before = run(decoder, request(weights="run-1"))["q"]
    vllm.unload(trained.folders["run-1"].name)
    assert tokens(run(decoder, request(weights="run-1"))["q"]) == tokens(before)


def test_an_adapter_loaded_by_another_client_is_used(new_decoder: NewDecoder, vllm: FakeVllm) -> None:
    first = run(new_decoder(), request(weights="run-1"))["q"]
    assert tokens(run(new_decoder(), request(weights="run-1"))["q"]) == tokens(first)


def test_weights_that_the_server_cannot_load_fail_without_a_path(new_decoder: NewDecoder, vllm: FakeVllm) -> None:
    decoder = new_decoder()
    run(decoder, request("warm"))
    path = "/v1/load_lora_adapter"
    vllm.answers[path] = [(500, {"error": {"message": "While loading /data/secret: rank 64"}})]
    outputs = run(decoder, request("big", "run-1"))
    assert outputs == {"big": vllm_sampler.NOT_LOADED}
    assert tokens(run(decoder, request("again", "run-1"))["again"])


def test_a_request_waits_until_the_folder_of_its_weights_is_written(new_decoder: NewDecoder, trained: Trained) -> None:
    written: dict[str, Path] = {}
    decoder = new_decoder(folder=written.get)
    decoder.add(request("waits", "run-1"))
    decoder.add(request("base"))
    base = next(step for step in steps(decoder) if step.finished)
    assert [name for name, _ in base.finished] == ["base"]
    assert decoder.waiting.total() == 1
    written.update(trained.folders)
    assert tokens(finish(decoder)["waits"])


def test_missing_weights_fail_their_request_alone(new_decoder: NewDecoder) -> None:
    def folder(key: str) -> Path:
        raise WeightsMissing(key)

    decoder = new_decoder(folder=folder)
    outputs = run(decoder, request("gone", "run-1"), request("base"))
    assert outputs["gone"] == vllm_sampler.WEIGHTS_DELETED
    assert tokens(outputs["base"])


def test_dropped_weights_are_unloaded_once_they_are_unused(
    new_decoder: NewDecoder, vllm: FakeVllm, trained: Trained
) -> None:
    name = trained.folders["run-1"].name
    same = {**trained.folders, "same": trained.folders["run-1"]}
    decoder = new_decoder(folder=same.__getitem__)
    run(decoder, request("warm"))
    vllm.may_generate.clear()
    decoder.add(request("one", "run-1"))
    decoder.add(request("two", "same"))
    vllm.wait_until(generating=2)
    decoder.drop_weights("run-1")  # "same" still uses them
    decoder.drop_weights("same")
    decoder.drop_weights("unknown")
    assert name in vllm.loaded
    vllm.may_generate.set()
    assert finish(decoder).keys() == {"one", "two"}
    vllm.wait_until(unloaded=name)
    assert vllm.pulled == []


def test_the_paths_of_folders_are_absolute(
    new_decoder: NewDecoder, vllm: FakeVllm, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = trained.folders["run-1"].parents[1]
    monkeypatch.chdir(root)
    relative = {run: path.relative_to(root) for run, path in trained.folders.items()}
    shared = Path(os.path.relpath(tmp_path))
    decoder = new_decoder(folder=relative.__getitem__, shared=shared)
    assert tokens(run(decoder, request("q", "run-1"))["q"])
    paths = [body["lora_path"] for body in vllm.bodies("/v1/load_lora_adapter")]
    assert all(Path(path).is_absolute() for path in paths if path)


SPEC = AdapterSpec(rank=2, seed=0)
LAYOUT = layout_of(SPEC)


@pytest.fixture
def stored(tmp_path: Path) -> list[str]:
    """Store five adapters. Return their digests."""
    root, weights = (Folder(tmp_path / "store"), [torch.full((LAYOUT.size,), float(n)) for n in range(5)])
    return [write_folder(root, HostWeights(SPEC, flat), LAYOUT, "m").digest for flat in weights]


def size_of(tmp_path: Path, digest: str) -> int:
    return sum(file.stat().st_size for file in (tmp_path / "store" / key_of(digest)).iterdir())


def copies_in(tmp_path: Path, limit_bytes: int) -> AdapterCopies:
    store = Folder(tmp_path / "store")
    return AdapterCopies(store, tmp_path / "copies", limit_bytes, "m", layout_of)


def held(tmp_path: Path) -> set[str]:
    return {config.parent.name for config in (tmp_path / "copies").glob(f"??/*/{CONFIG}")}


def test_a_copy_has_the_saved_weights(tmp_path: Path, stored: list[str]) -> None:
    copies_in(tmp_path, 10**9).fetch(stored[3])
    assert read_folder(Folder(tmp_path / "copies"), stored[3], layout_of).flat.eq(3.0).all()


def test_the_least_recently_used_copy_is_removed(tmp_path: Path, stored: list[str]) -> None:
    copies = copies_in(tmp_path, 3 * size_of(tmp_path, stored[0]))
    for digest in (*stored[:3], stored[0], stored[3]):
        copies.fetch(digest)
    assert held(tmp_path) == {stored[0], stored[2], stored[3]}
    copies.fetch(stored[1])  # fetched again
    assert held(tmp_path) == {stored[0], stored[3], stored[1]}


def test_a_copy_loaded_by_the_server_is_kept(tmp_path: Path, stored: list[str]) -> None:
    copies = copies_in(tmp_path, 2 * size_of(tmp_path, stored[0]))
    for number, digest in enumerate(stored):
        copies.fetch(digest, loaded=stored[: min(number, 3)])
    assert held(tmp_path) == {*stored[:3], stored[4]}


def test_a_new_process_starts_without_copies(tmp_path: Path, stored: list[str]) -> None:
    copies_in(tmp_path, 10**9).fetch(stored[0])
    copies = copies_in(tmp_path, 10**9)
    assert held(tmp_path) == set()
    copies.fetch(stored[0])
    assert held(tmp_path) == {stored[0]}


@pytest.mark.parametrize("is_there", [False, True])
def test_missing_or_damaged_weights_are_not_copied(tmp_path: Path, stored: list[str], is_there: bool) -> None:
    tensors = tmp_path / "store" / key_of(stored[0]) / TENSORS
    if is_there:
        content = bytearray(tensors.read_bytes())
        content[-1] ^= 1
        tensors.write_bytes(content)
    else:
        tensors.unlink()
    with pytest.raises(FolderUnreadable):
        copies_in(tmp_path, 10**9).fetch(stored[0])
    assert held(tmp_path) == set()
