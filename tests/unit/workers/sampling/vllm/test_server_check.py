"""Check of a vLLM server at the start: the server as documented passes, and each wrong setting is named."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from cotrain_workers.engine.model.base_model import find_targets, make_skeleton
from cotrain_workers.engine.spec import Target
from cotrain_workers.sampling.vllm.client import ServerFacts, VllmServer, VllmUnavailable
from cotrain_workers.sampling.vllm.server_check import VllmUnusable, base_card, check_server
from tests.support.fake_vllm import FakeVllm
from tests.support.tiny_models import build_tiny
from tests.support.vllm_requests import BASE


@pytest.fixture(scope="module")
def targets(model: Path) -> tuple[Target, ...]:
    return find_targets(make_skeleton(AutoConfig.from_pretrained(model)))


def check(vllm: FakeVllm, targets: tuple[Target, ...], shared: Path, key: str = "") -> ServerFacts:
    async def run() -> ServerFacts:
        server = VllmServer(vllm.url, key)
        try:
            return await check_server(server, BASE, targets, shared)
        finally:
            await server.close()

    return asyncio.run(run())


def test_a_server_set_up_as_documented_passes_and_keeps_no_probe(
    vllm: FakeVllm, targets: tuple[Target, ...], tmp_path: Path
) -> None:
    assert check(vllm, targets, tmp_path) == ServerFacts(BASE, 64, adapts_unembedding=True)
    assert vllm.loaded == set()


@pytest.mark.parametrize("unembedding", ["refused", "ignored"])
def test_a_server_that_ignores_the_unembedding_is_detected(
    vllm: FakeVllm, targets: tuple[Target, ...], tmp_path: Path, unembedding: str
) -> None:
    vllm.unembedding = unembedding
    assert not check(vllm, targets, tmp_path).adapts_unembedding
    assert vllm.loaded == set()


@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")
def test_a_server_that_drops_experts_is_detected(model: Path, tmp_path: Path) -> None:
    base = build_tiny("qwen3_moe", tmp_path / "base", vocab=512)
    for file in model.glob("tokenizer*"):
        shutil.copy(file, base)
    of_mixture = find_targets(make_skeleton(AutoConfig.from_pretrained(base)))
    with FakeVllm(base, BASE) as vllm:
        found = check(vllm, of_mixture, tmp_path)
        assert (found.adapts_unembedding, found.adapts_experts) == (True, True)
        vllm.drops_experts = True
        found = check(vllm, of_mixture, tmp_path)
        assert (found.adapts_unembedding, found.adapts_experts) == (True, False)


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logits"])
def test_logprobs_that_are_not_those_of_the_raw_model_are_detected(
    vllm: FakeVllm, targets: tuple[Target, ...], tmp_path: Path, mode: str
) -> None:
    vllm.logprobs_mode = mode
    with pytest.raises(VllmUnusable, match="--logprobs-mode raw_logprobs"):
        check(vllm, targets, tmp_path)


def test_another_base_model_is_named(vllm: FakeVllm, targets: tuple[Target, ...], tmp_path: Path) -> None:
    vllm.name = "other/model"
    with pytest.raises(VllmUnusable, match=r"serves other/model.*--served-model-name tiny/qwen3"):
        check(vllm, targets, tmp_path)


def test_a_server_without_runtime_adapter_loading_is_reported(
    vllm: FakeVllm, targets: tuple[Target, ...], tmp_path: Path
) -> None:
    vllm.updates_lora = False
    with pytest.raises(VllmUnusable, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
        check(vllm, targets, tmp_path)


def test_a_folder_invisible_to_the_server_is_reported(
    vllm: FakeVllm, targets: tuple[Target, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(name: str, path: str, _: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(vllm._model, "load", elsewhere)
    with pytest.raises(VllmUnusable, match="must see that folder under the same path"):
        check(vllm, targets, tmp_path)


def test_adapters_without_effect_are_detected(
    vllm: FakeVllm, targets: tuple[Target, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted: dict[str, Any] = vllm._model.adapted
    monkeypatch.setattr(vllm._model, "load", lambda name, *_: adapted.update({name: vllm._model.base}))
    with pytest.raises(VllmUnusable, match="change nothing"):
        check(vllm, targets, tmp_path)


def test_a_wrong_key_is_reported(vllm: FakeVllm, targets: tuple[Target, ...], tmp_path: Path) -> None:
    vllm.api_key = "right"
    assert check(vllm, targets, tmp_path, key="right").model == BASE
    with pytest.raises(VllmUnusable, match=r"401.*COTRAIN_VLLM_API_KEY"):
        check(vllm, targets, tmp_path, key="wrong")


def test_a_server_other_than_vllm_is_detected(vllm: FakeVllm, targets: tuple[Target, ...], tmp_path: Path) -> None:
    vllm.answers["/v1/models"] = [(200, {"models": []})]
    with pytest.raises(VllmUnusable, match="not answer as a supported vLLM"):
        check(vllm, targets, tmp_path)


def test_an_unavailable_or_starting_server_is_not_unusable(
    vllm: FakeVllm, targets: tuple[Target, ...], tmp_path: Path
) -> None:
    vllm.answers["/v1/models"] = [(503, "starting")]
    with pytest.raises(VllmUnavailable, match="503"):
        check(vllm, targets, tmp_path)
    vllm.stop()
    with pytest.raises(VllmUnavailable, match="no connection"):
        check(vllm, targets, tmp_path)
    vllm.start()


def test_a_probe_removed_by_another_worker_is_not_a_fault_of_the_server(
    vllm: FakeVllm, targets: tuple[Target, ...], tmp_path: Path
) -> None:
    def lose_the_probe() -> tuple[int, object]:
        for name in vllm.loaded:
            vllm.unload(name)
        return 404, {"error": {"message": "The model does not exist."}}

    # after the log-probs at two temperatures, and those of the base model with the first probe
    vllm.answers["/v1/completions"] = [None, None, None, lose_the_probe]
    with pytest.raises(VllmUnavailable, match="lost a probe"):
        check(vllm, targets, tmp_path)


def test_an_unwritable_folder_is_reported(vllm: FakeVllm, targets: tuple[Target, ...], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(VllmUnusable, match="No adapter can be written"):
        check(vllm, targets, tmp_path / "file")


def test_the_base_model_is_found_by_its_name_or_by_its_source() -> None:
    adapter = {"id": BASE, "parent": "x", "root": BASE}
    served = {"id": "x", "parent": None, "root": BASE}
    assert base_card(BASE, [adapter, served]) == served
    assert base_card("x", [adapter, served]) == served
    with pytest.raises(VllmUnusable, match="serves nothing"):
        base_card(BASE, [])
