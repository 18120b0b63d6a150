from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain_workers.engine.engine import Engine
from tests.support.shared_base import shared_base
from tests.support.tiny_models import build_tiny
from tests.support.training import ModelFolder, NewEngine


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Pin the thread count: it is part of what makes two results equal to the bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """Return a function (family, tied=False, layers=2) -> folder; each model is written once per session."""

    @cache
    def folder(family: str = "qwen3", *, tied: bool = False, layers: int = 2) -> Path:
        return build_tiny(family, tmp_path_factory.mktemp(family), tied=tied, layers=layers)

    return folder


@pytest.fixture
def new_engine(model_folder: ModelFolder) -> NewEngine:
    """Return a function that makes a fresh engine over a tiny model."""

    def load(family: str = "qwen3", *, tied: bool = False, layers: int = 2, **settings: Any) -> Engine:
        folder = model_folder(family, tied=tied, layers=layers)
        return Engine.load(str(folder), load_base=shared_base, **settings)

    return load


@pytest.fixture
def lost_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each sync of a file fail, as on a disk that is gone."""

    def fail(_: int) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "fsync", fail)
