from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cotrain_workers.sampling.vllm import decoder as vllm_sampler
from cotrain_workers.sampling.vllm.decoder import VllmDecoder
from tests.support.fake_vllm import FakeVllm
from tests.support.tiny_models import build_tiny_qwen3
from tests.support.vllm_requests import BASE, Trained

NewDecoder = Callable[..., VllmDecoder]


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="package")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(model, tmp_path_factory.mktemp("weights"))


@pytest.fixture
def vllm(model: Path) -> Iterator[FakeVllm]:
    with FakeVllm(model, BASE) as server:
        yield server


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_sampler, "PAUSE_S", (0.002, 0.02))


@pytest.fixture
def new_decoder(vllm: FakeVllm, trained: Trained, tmp_path: Path) -> Iterator[NewDecoder]:
    opened: list[VllmDecoder] = []

    def new(**settings: object) -> VllmDecoder:
        opened.append(trained.decoder(vllm.url, **{"shared": tmp_path, **settings}))
        return opened[-1]

    yield new
    for decoder in opened:
        decoder.close()
