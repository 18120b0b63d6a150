"""Exports of a real server's checkpoints, loaded by plain transformers, PEFT, gguf and a small vLLM server."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from cotrain import AdamParams, Datum, ExportFailed, ModelInput, RequestFailed, SamplingParams, ServiceClient
from cotrain.cli import command_line
from tests.conformance.running import ROOT
from tests.support.draws import variant
from tests.support.fake_vllm import FakeVllm
from tests.support.serving import Serving
from tests.support.tiny_models import build_tiny
from tests.warm.popen import run

KEY = "tml-exporter_0123456789abcdef"
VOCAB = 128
#: Base models, and whether their embeddings are tied.
FAMILIES = {"qwen3": True, "llama": False, "gemma2": True, "mixtral": False}
#: fp32 on both sides; `W + scale * B @ A` is rounded once more.
EXACT = 1e-5


class Case(NamedTuple):
    """A base model with a trained checkpoint, and the server's log-probs of one text."""

    base: Path
    path: str
    text: list[int]
    logprobs: list[float]


class Place(NamedTuple):
    address: str
    cases: dict[str, Case]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A server of several families, each with an adapter on all modules."""
    root = tmp_path_factory.mktemp("exports")
    bases = {name: build_tiny(name, root / name, tied=tied, vocab=VOCAB) for name, tied in FAMILIES.items()}
    with (
        Serving(root / "data", [str(base) for base in bases.values()], [KEY]) as serving,
        ServiceClient(serving.address, KEY) as service,
    ):
        cases = {name: trained(service, base) for name, base in bases.items()}
        yield Place(serving.address, cases)


def trained(service: ServiceClient, base: Path) -> Case:
    """Train all modules for two steps and save."""
    text = random.Random(1).choices(range(VOCAB), k=24)
    datum = Datum(
        model_input=ModelInput.from_ints(text[:-1]), loss_fn_inputs={"target_tokens": text[1:], "weights": [1.0] * 23}
    )
    run = service.create_lora_training_client(str(base), rank=4, seed=3)
    for _ in range(2):
        run.forward_backward([datum], "cross_entropy")
        run.optim_step(AdamParams(learning_rate=2e-2))
    output = run.forward([datum], "cross_entropy")
    path = str(run.save_weights_for_sampler("kept").result().path)
    return Case(base, path, text, output.result().loss_fn_outputs[0]["logprobs"].tolist())


@pytest.fixture
def cotrain(place: Place) -> Any:
    app = command_line([])

    def run(*arguments: str) -> Result:
        environment = {"COTRAIN_BASE_URL": place.address, "COTRAIN_API_KEY": KEY}
        return CliRunner().invoke(app, arguments, env=environment)

    return run


def test_experts_of_samples_are_replayed_by_a_pass(place: Place) -> None:
    """Not an export, but this server has a mixture of experts."""
    case = place.cases["mixtral"]
    with ServiceClient(place.address, KEY) as service:
        sampler = service.create_sampling_client(model_path=case.path)
        prompt, few = ModelInput.from_ints(case.text[:9]), SamplingParams(max_tokens=8)
        found = sampler.sample(prompt, 2, few, return_routed_experts=True).result()
        plain = sampler.sample(prompt, 1, few).result()
        assert plain.prompt_routed_experts is plain.sequences[0].routed_experts is None
        run = service.create_training_client_from_state(case.path)
        assert found.prompt_routed_experts is not None
        own = given = None
        for sequence in found.sequences:
            assert sequence.routed_experts is not None
            given = found.prompt_routed_experts + sequence.routed_experts
            tokens = [*case.text[:9], *sequence.tokens]
            inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
            own = Datum(ModelInput.from_ints(tokens[:-1]), inputs)
            other = (given.to_numpy() + 1) % 3
            data = [own, *(Datum(own.model_input, inputs, each) for each in (given, other))]
            outputs = run.forward(data, "cross_entropy").result().loss_fn_outputs
            plainly, replayed, moved = (each["logprobs"].data for each in outputs)
            assert plainly == replayed
            assert max(abs(a - b) for a, b in zip(plainly, moved, strict=True)) > EXACT
            assert sequence.logprobs == pytest.approx(replayed[8:], abs=EXACT)
        assert own is not None
        assert given is not None
        wrong = Datum(own.model_input, own.loss_fn_inputs, given[1:])
        with pytest.raises(RequestFailed, match=r"routed_experts has shape \[\d+, 2, 2\]"):
            run.forward([wrong], "cross_entropy").result()


def distance(model: Any, case: Case) -> float:
    """Return the largest difference of a model's log-probs from the server's."""
    tokens = torch.tensor([case.text])
    with torch.no_grad():
        rows = model(input_ids=tokens[:, :-1]).logits[0].log_softmax(-1)
    found = rows.gather(1, tokens[0, 1:, None])[:, 0]
    return float((found - torch.tensor(case.logprobs)).abs().max())


@pytest.mark.parametrize("family", ["qwen3", variant("llama"), variant("gemma2"), "mixtral"])
def test_a_merged_export_is_the_servers_model_in_plain_transformers(
    place: Place, cotrain: Any, tmp_path: Path, family: str
) -> None:
    case, output = place.cases[family], tmp_path / "merged"
    done = cotrain("export", case.path, "--merged", "-o", str(output), "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["proof"]["largest"] <= EXACT
    assert facts["proof"]["moved"] > 0.1  # else the comparison shows nothing
    model = AutoModelForCausalLM.from_pretrained(output)
    assert distance(model, case) <= EXACT
    assert distance(AutoModelForCausalLM.from_pretrained(case.base), case) > 0.1
    assert model.config.tie_word_embeddings is False
    unties = any("tie_word_embeddings" in note for note in facts["notes"])
    assert unties is FAMILIES[family]
    card = (output / "README.md").read_text()
    assert case.path in card
    assert "library_name: transformers" in card
    assert "largest difference" in card


def test_an_adapter_for_peft_is_the_downloaded_one_with_a_card(place: Place, cotrain: Any, tmp_path: Path) -> None:
    case, output = place.cases["qwen3"], tmp_path / "peft"
    done = cotrain("export", case.path, "--peft", "-o", str(output))
    assert (done.exit_code, done.stdout) == (0, f"{output}\n"), done.output
    assert "Do not merge this adapter with PEFT" in done.stderr
    assert "largest difference" in done.stderr
    fetched = cotrain("download", case.path, "--output", str(tmp_path / "plain"))
    assert "merge_and_unload gives another model" in fetched.stderr
    for file in (tmp_path / "plain").iterdir():
        assert (output / file.name).read_bytes() == file.read_bytes()
    experts = cotrain("export", place.cases["mixtral"].path, "--peft", "-o", str(tmp_path / "moe"))
    assert experts.exit_code == 0, experts.output
    quiet = cotrain("download", place.cases["llama"].path, "--output", str(tmp_path / "untied"))
    assert quiet.stderr == ""


def test_vllm_gets_what_it_serves_and_is_compared(
    place: Place, cotrain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = SimpleNamespace(decode=lambda tokens: "")
    monkeypatch.setattr("tests.support.fake_vllm.tokenizer_of", lambda folder: tokenizer)
    case = place.cases["qwen3"]
    merged, adapter = tmp_path / "whole", tmp_path / "adapter"
    done = cotrain("export", case.path, "--vllm", "-o", str(merged))
    assert done.exit_code == 0, done.output
    assert "Merged, because most classes of vLLM" in done.stderr
    with FakeVllm(case.base, "base") as vllm:
        vllm.unembedding = "refused"
        given = ("--vllm", "--leave-out-unembed", "--check", vllm.url, "-o", str(adapter), "--json")
        done = cotrain("export", case.path, *given)
        assert done.exit_code == 0, done.output
        facts = json.loads(done.stdout)
        assert facts["kind"] == "adapter"
        assert facts["checked"]["largest"] <= EXACT
        assert vllm.loaded == {"adapter"}
        assert any("Without it, log-probs differ" in note for note in facts["notes"])
    for folder, status in ((merged, 0), (case.base, 1)):  # the base model in place of the merged one
        with FakeVllm(folder, "merged") as vllm:
            again = cotrain("export", case.path, "--vllm", "--check", vllm.url, "-o", str(merged))
            assert again.exit_code == status, again.output
            assert ("is not the server's model" in again.stderr) is bool(status)
    refused = cotrain("export", place.cases["gemma2"].path, "--vllm", "-o", str(tmp_path / "d"))
    assert refused.exit_code == 1
    assert "vLLM always ties the embeddings of gemma2" in refused.stderr
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("family", [variant("llama"), "gemma2"])
def test_tensors_in_gguf_are_the_adapters(place: Place, cotrain: Any, tmp_path: Path, family: str) -> None:
    case, output = place.cases[family], tmp_path / "gguf"
    leaves_out = ["--leave-out-unembed"] if family != "llama" else []
    done = cotrain("export", case.path, "--gguf", *leaves_out, "-o", str(output))
    assert done.exit_code == 0, done.output
    assert cotrain("download", case.path, "--output", str(tmp_path / "plain")).exit_code == 0
    ours = load_file(tmp_path / "plain" / "adapter_model.safetensors")
    reader = gguf.GGUFReader(output / "adapter.gguf")
    assert reader.fields["adapter.lora.alpha"].contents() == 32.0
    assert reader.fields["general.architecture"].contents() == family
    found = {each.name: torch.tensor(each.data) for each in reader.tensors}
    names = {
        "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj",
        "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj",
        "blk.1.attn_k.weight": "model.layers.1.self_attn.k_proj",
        "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj",
    } | ({"output.weight": "lm_head"} if family == "llama" else {})
    assert len(found) == len(ours) - 2 * (family != "llama")
    for theirs, module in names.items():
        a, b = (ours[f"base_model.model.{module}.lora_{letter}.weight"] for letter in "AB")
        if family == "llama" and ("attn_q" in theirs or "attn_k" in theirs):
            # A head has 16 values: value i and value i + 8 become neighbours.
            b = b[[head + i + 8 * half for head in range(0, len(b), 16) for i in range(8) for half in (0, 1)]]
        assert torch.equal(found[f"{theirs}.lora_a"], a)
        assert torch.equal(found[f"{theirs}.lora_b"], b)


def test_an_export_that_cannot_be_right_leaves_no_folder(place: Place, cotrain: Any, tmp_path: Path) -> None:
    case = place.cases["llama"]
    other = shutil.copytree(case.base, tmp_path / "other")
    model = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight += 0.05
    model.save_pretrained(other)
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("kept")
    for arguments, reason in {
        ("--merged", "--base", str(other)): "the export is not the server's model",
        ("--merged", "--base", str(place.cases["qwen3"].base)): "another model than the run's",
        ("--merged", "--base", str(full)): "has no readable config.json",
        ("--peft", "--dtype", "float16"): "dtype is of merged weights",
        ("--gguf", "--check", "http://127.0.0.1:9"): "reads no GGUF adapter",
    }.items():
        done = cotrain("export", case.path, *arguments, "-o", str(tmp_path / "out"))
        assert (done.exit_code, done.stderr.count("\n")) == (1, 1), done.output
        assert reason in done.stderr
    assert {each.name for each in tmp_path.iterdir()} == {"other", "full"}
    done = cotrain("export", case.path, "--merged", "-o", str(full))
    assert "exists and is not an empty folder" in done.stderr
    assert cotrain("export", case.path, "-o", str(full)).exit_code == 2
    with ServiceClient(place.address, KEY) as service, pytest.raises(ExportFailed, match="form is"):
        service.export_checkpoint(case.path, tmp_path / "x", "onnx")  # type: ignore[arg-type]


def test_a_missing_library_is_named_with_its_remedy(
    place: Place, cotrain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    done = cotrain("export", place.cases["llama"].path, "--gguf", "-o", str(tmp_path / "x"))
    assert done.exit_code == 1
    assert "needs gguf: pip install" in done.stderr


COOKBOOK = ROOT / ".sdk" / "tinker_cookbook-0.6.1" / "site-packages"
#: fp32, and the sum `W + scale * B @ A` is rounded once more when it is merged.
TOLERANCE = 1e-5

#: One matrix is both embedding and unembedding: no merged model can hold LoRA on one of them alone.
IMPOSSIBLE = {"tied everything merged", "tied unembedding merged"}


@pytest.fixture(scope="module")
def distances() -> Mapping[str, float | str]:
    if not COOKBOOK.exists():
        pytest.fail("tinker_cookbook is missing: run tests/cookbook/fetch.sh")
    roots = [ROOT, *(ROOT / name for name in ("client", "scheduler", "server", "workers"))]
    done = run(
        [sys.executable, "-m", "tests.conformance.cookbook_weights"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*roots, COOKBOOK]))},
    )
    assert done.returncode == 0, done.stderr
    found: Mapping[str, float | str] = json.loads(done.stdout)
    return found


def test_an_export_merges_and_converts_to_the_same_function(distances: Mapping[str, float | str]) -> None:
    far = {case: far for case, far in distances.items() if isinstance(far, str) or far > TOLERANCE}
    assert set(far) == IMPOSSIBLE
    assert len(distances) == 14


def test_what_cannot_be_merged_is_refused_and_not_merged_wrongly(distances: Mapping[str, float | str]) -> None:
    for case in IMPOSSIBLE:
        assert "lm_head.weight" in str(distances[case])
