from __future__ import annotations

import hashlib
import json
import subprocess
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cotrain_store.blobs.folder import Folder
from cotrain_store.disk.checksums import SUMS, read_sums, sums_of
from cotrain_workers.checkpoints import peft_folder
from cotrain_workers.checkpoints.peft_folder import (
    CONFIG,
    TENSORS,
    FolderUnreadable,
    SumsUnusable,
    Written,
    digest,
    key_of,
    read_folder,
    remove_folder,
    write_folder,
)
from cotrain_workers.engine.ops import HostWeights, Pass, PassOutput
from cotrain_workers.engine.spec import AdapterSpec, Layout, Target, plan_layout
from tests.support.draws import variant
from tests.support.full_table import no_descriptor
from tests.support.training import MIX, ModelFolder, NewEngine, Tenant, random_datum

BASE = "qwen/tiny"
TARGETS = (
    Target("model.layers.0.self_attn.q_proj", "attn", 6, 10),
    Target("model.layers.0.mlp.down_proj", "mlp", 5, 3),
    Target("lm_head", "unembed", 4, 7),
)


def layout_of(spec: AdapterSpec) -> Layout:
    return plan_layout(spec, TARGETS)


def some_weights(spec: AdapterSpec | None = None, seed: int = 0) -> HostWeights:
    spec = spec or AdapterSpec(rank=3, seed=5)
    layout = layout_of(spec)
    flat = torch.zeros(layout.size)
    generator = torch.Generator().manual_seed(seed)
    for pair in layout.views(flat).values():
        for matrix in pair:
            matrix.copy_(torch.randn(matrix.shape, generator=generator))
    return HostWeights(spec, flat)


def written(root: Path, weights: HostWeights | None = None) -> Written:
    weights = weights or some_weights()
    return write_folder(Folder(root), weights, layout_of(weights.spec), BASE)


def read(root: Path, digest: str) -> HostWeights:
    return read_folder(Folder(root), digest, layout_of)


ODD_SCALE = Tenant("all-2", AdapterSpec(2, seed=8, alpha=7.5), "cross_entropy", (9, 4))


@pytest.mark.parametrize(
    ("tenant", "tied"),
    [
        *((tenant, False) for tenant in (*MIX[:4], ODD_SCALE)),
        (MIX[0], True),
        *(variant(tenant, False) for tenant in MIX[4:]),
        *(variant(tenant, True) for tenant in (*MIX[1:], ODD_SCALE)),
    ],
)
def test_plain_peft_loads_the_folder_with_equal_results(
    new_engine: NewEngine, model_folder: ModelFolder, tmp_path: Path, tenant: Any, tied: bool
) -> None:
    engine, base = new_engine(tied=tied), model_folder("qwen3", tied=tied)
    engine.run(tenant.ops(0))  # one optimizer step: B is no longer zero
    weights = HostWeights(tenant.spec, engine.adapters.state(tenant.run).weights)
    folder = write_folder(Folder(tmp_path), weights, engine.adapters[tenant.run].layout, str(base))
    datum = random_datum(np.random.default_rng(0), "cross_entropy", 40)
    forward = Pass(tenant.run, 99, [datum], "cross_entropy", {}, needs_grad=False)
    output = engine.run([forward]).outputs[tenant.run, 99]
    assert isinstance(output, PassOutput)

    network: Any = AutoModelForCausalLM.from_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tied embeddings, and deprecated names of transformers
        plain: Any = PeftModel.from_pretrained(network, tmp_path / folder.key)
    with torch.no_grad():
        logits = plain(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0]
    targets = torch.from_numpy(datum.inputs["target_tokens"])[:, None]
    theirs = torch.log_softmax(logits, -1).gather(1, targets)[:, 0].numpy()
    assert np.abs(theirs - output.logprobs[0]).max() < 1e-5


def test_peft_reads_every_key_of_the_config_with_its_value(tmp_path: Path) -> None:
    spec = AdapterSpec(rank=5, seed=1, alpha=7.5)
    folder = written(tmp_path, some_weights(spec))
    config = json.loads((tmp_path / folder.key / CONFIG).read_text())
    read_by_peft = LoraConfig.from_peft_type(**config)  # warns of a key that it does not have
    values = read_by_peft.to_dict()
    assert {key: values[key] for key in config} == config | {"target_modules": {"q_proj", "down_proj", "lm_head"}}


@pytest.mark.parametrize(
    "spec",
    [
        AdapterSpec(rank=1, seed=0),
        AdapterSpec(rank=5, seed=1, train_attn=False, alpha=7.5),
        AdapterSpec(rank=16, seed=2**40, train_mlp=False, train_unembed=False),
    ],
)
def test_an_adapter_is_unchanged_by_writing_and_reading(tmp_path: Path, spec: AdapterSpec) -> None:
    weights = some_weights(spec)
    folder = written(tmp_path, weights)
    found = read(tmp_path, folder.digest)
    assert found.spec == spec
    assert found.flat.numpy().tobytes() == weights.flat.numpy().tobytes()


def test_special_bit_patterns_are_kept(tmp_path: Path) -> None:
    weights = some_weights()
    weights.flat[0], weights.flat[1], weights.flat[2] = float("nan"), -0.0, float("-inf")
    found = read(tmp_path, written(tmp_path, weights).digest)
    assert found.flat.numpy().tobytes() == weights.flat.numpy().tobytes()


def test_the_digest_is_the_name_of_the_folder_with_the_size_of_its_files(tmp_path: Path) -> None:
    weights = some_weights()
    folder = written(tmp_path, weights)
    assert folder.digest == digest(weights.spec, BASE, weights.flat)
    assert folder.key == key_of(folder.digest) == f"{folder.digest[:2]}/{folder.digest}"
    assert folder.size == sum(path.stat().st_size for path in (tmp_path / folder.key).iterdir())


def test_a_folder_has_the_checksums_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / written(tmp_path).key
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in (TENSORS, CONFIG)}
    assert read_sums((folder / SUMS).read_bytes()) == sums


def test_equal_digests_mean_equal_contents() -> None:
    weights = some_weights()
    changed = weights.flat.clone()
    changed[-5] = torch.nextafter(changed[-5], torch.tensor(9e9))
    digests = {
        digest(weights.spec, BASE, weights.flat),
        digest(weights.spec, BASE, weights.flat.clone()),
        digest(weights.spec, "another", weights.flat),
        digest(weights.spec, BASE, changed),
        digest(replace(weights.spec, alpha=8.0), BASE, weights.flat),
        digest(replace(weights.spec, seed=6), BASE, weights.flat),
    }
    assert len(digests) == 5


def test_equal_content_is_written_once(tmp_path: Path) -> None:
    first = written(tmp_path)
    inode = (tmp_path / first.key / TENSORS).stat().st_ino
    assert written(tmp_path) == first
    assert (tmp_path / first.key / TENSORS).stat().st_ino == inode
    assert [path.name for path in (tmp_path / first.key).parent.iterdir()] == [first.digest]


def test_an_adapter_has_the_same_bytes_from_every_writer(tmp_path: Path) -> None:
    files = [written(tmp_path / str(number)) for number in range(8)]
    contents = {(tmp_path / str(number) / folder.key / TENSORS).read_bytes() for number, folder in enumerate(files)}
    assert len(contents) == 1


def test_concurrent_writers_of_one_adapter_leave_one_complete_folder(tmp_path: Path) -> None:
    weights, together = some_weights(), threading.Barrier(8)
    folders: list[Written] = []

    def write() -> None:
        together.wait()
        folders.append(written(tmp_path, weights))

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 8
    assert len(set(folders)) == 1
    assert [path.name for path in (tmp_path / folders[0].key).parent.iterdir()] == [folders[0].digest]
    assert read(tmp_path, folders[0].digest).spec == weights.spec


@pytest.mark.parametrize("file", [TENSORS, CONFIG])
def test_a_damaged_folder_is_unreadable_until_it_is_written_again(tmp_path: Path, file: str) -> None:
    folder = written(tmp_path)
    content = (tmp_path / folder.key / file).read_bytes()
    (tmp_path / folder.key / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(FolderUnreadable, match="cannot be read"):
        read(tmp_path, folder.digest)
    assert written(tmp_path) == folder
    assert read(tmp_path, folder.digest).spec == some_weights().spec
    assert [path.name for path in (tmp_path / folder.key).parent.iterdir()] == [folder.digest]


@pytest.mark.parametrize("at", [-1, -40, 20])
def test_a_changed_byte_is_detected(tmp_path: Path, at: int) -> None:
    path = tmp_path / written(tmp_path).key
    content = bytearray((path / TENSORS).read_bytes())
    content[at] ^= 1
    (path / TENSORS).write_bytes(bytes(content))
    with pytest.raises(FolderUnreadable):
        read(tmp_path, path.name)


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a folder without its metadata."""
    tensors: dict[str, torch.Tensor] = load_file(path / TENSORS)
    metadata = peft_folder.metadata_of((path / TENSORS).read_bytes())
    change(tensors)
    save_file(tensors, path / TENSORS, metadata)


A = "base_model.model.lm_head.lora_A.weight"
CHANGES: Mapping[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "missing": lambda tensors: tensors.pop(A),
    "unexpected": lambda tensors: tensors.update(more=torch.zeros(1)),
    "shape": lambda tensors: tensors.update({A: tensors[A].reshape(-1).clone()}),
    "dtype": lambda tensors: tensors.update({A: tensors[A].half()}),
    "value": lambda tensors: tensors.update({A: tensors[A] + 1}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_tensors_that_do_not_match_the_spec_are_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / written(tmp_path).key
    rewrite(path, CHANGES[change])
    with pytest.raises(FolderUnreadable):
        read(tmp_path, path.name)


def test_a_config_with_another_scale_is_refused(tmp_path: Path) -> None:
    path = tmp_path / written(tmp_path).key
    config = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps({**config, "lora_alpha": 64}))
    with pytest.raises(FolderUnreadable, match=CONFIG):
        read(tmp_path, path.name)


SUMS_FAULTS: Mapping[str, tuple[Callable[[str], str | None], str]] = {
    "gone": (lambda _: None, "SHA256SUMS is missing"),
    "empty": (lambda _: "", f"SHA256SUMS has no line for {CONFIG}"),
    "one line": (lambda text: text.splitlines()[0], f"SHA256SUMS has no line for {CONFIG}"),
    "no sums": (lambda _: f"x  {CONFIG}\ny  {TENSORS}\n", f"SHA256SUMS has no line for {CONFIG}"),
    "of others": (lambda _: sums_of({CONFIG: b"other", TENSORS: b"other"}), f"{CONFIG} is not the one of SHA256SUMS"),
}


@pytest.mark.parametrize("fault", SUMS_FAULTS)
def test_an_adapter_without_checksums_is_refused_with_a_remedy(tmp_path: Path, fault: str) -> None:
    change, said = SUMS_FAULTS[fault]
    folder = written(tmp_path)
    sums = tmp_path / folder.key / SUMS
    whole = sums.read_text()
    changed = change(whole)
    sums.unlink() if changed is None else sums.write_text(changed)
    with pytest.raises(SumsUnusable, match=said) as refused:
        read(tmp_path, folder.digest)
    assert "Save the checkpoint again" in str(refused.value)
    assert written(tmp_path) == folder
    assert sums.read_text() == whole
    read(tmp_path, folder.digest)


def test_checksums_written_by_the_operator_are_accepted(tmp_path: Path) -> None:
    folder = tmp_path / written(tmp_path).key
    (folder / "more").write_bytes(b"no file of an adapter")
    sums = subprocess.check_output(["sha256sum", "--binary", CONFIG, TENSORS], cwd=folder)
    (folder / SUMS).write_bytes(sums)
    assert read(tmp_path, folder.name).spec == some_weights().spec


def test_an_adapter_under_the_name_of_another_is_refused(tmp_path: Path) -> None:
    one, other = written(tmp_path), written(tmp_path, some_weights(seed=1))
    remove_folder(Folder(tmp_path), other.digest)
    (tmp_path / one.key).rename(tmp_path / other.key)
    with pytest.raises(FolderUnreadable, match="other weights than its name"):
        read(tmp_path, other.digest)


def test_a_missing_folder_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(FolderUnreadable, match="cannot be read"):
        read(tmp_path, "0" * 64)


def test_a_process_without_descriptors_does_not_report_a_lost_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / written(tmp_path).key
    monkeypatch.setattr("pathlib.Path.open", no_descriptor)
    with pytest.raises(OSError, match="Too many open files"):
        read(tmp_path, path.name)


@pytest.mark.usefixtures("lost_disk")
def test_an_interrupted_write_leaves_no_file_under_the_final_name(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone"):
        written(tmp_path)
    assert not list(tmp_path.glob("??/*/[!.]*"))


def test_removal_deletes_one_adapter_and_may_be_repeated(tmp_path: Path) -> None:
    one, other = written(tmp_path), written(tmp_path, some_weights(seed=1))
    remove_folder(Folder(tmp_path), one.digest)
    remove_folder(Folder(tmp_path), one.digest)
    assert list((tmp_path / one.key).parent.glob(f"*{one.digest}*")) == []
    assert read(tmp_path, other.digest).spec == some_weights().spec
