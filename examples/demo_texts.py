"""Real text of several kinds, read from the Python installation that runs the demo.

The base model is trained on some kinds, and each tenant trains on another. The text comes from Python itself and from
packages that cotrain pins, so it does not depend on other installed packages.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import metadata
from pathlib import Path
from pydoc_data.topics import topics

STDLIB = Path(sysconfig.get_paths()["stdlib"])
PACKAGES = Path(sysconfig.get_paths()["purelib"])
HEADERS = PACKAGES / "torch" / "include"
DESCRIBED = (
    "accelerate", "fastapi", "h11", "httpcore", "httpx", "huggingface_hub", "mpmath",
    "networkx", "numpy", "peft", "psutil", "pydantic", "redis", "regex", "rich", "structlog", "sympy",
    "tokenizers", "torch", "tqdm", "transformers", "typer", "uvicorn",
)  # fmt: skip
"""Packages whose descriptions are read."""
MAX_CHARACTERS = 1_200_000
"""Limit for one kind of text."""
PASSAGE_LINES = 40
MIN_CHARACTERS = 200
TRAIN_SHARE = 0.85


@dataclass(frozen=True)
class TenantText:
    """Passages of one kind of text: for training, and held out for evaluation."""

    train: tuple[str, ...]
    holdout: tuple[str, ...]


@cache
def base_text(kind: str) -> tuple[str, ...]:
    """Read one kind of text of the base model."""
    return _passages(BASE_KINDS[kind](), kind)


@cache
def tenant_text(kind: str) -> TenantText:
    """Read one kind of text of a tenant, and split it; the split is always the same."""
    passages = _passages(TENANT_KINDS[kind](), kind)
    num_train = int(TRAIN_SHARE * len(passages))
    return TenantText(passages[:num_train], passages[num_train:])


def _passages(documents: Iterable[str], seed: str) -> tuple[str, ...]:
    """Cut documents into passages of at most `PASSAGE_LINES` lines, shuffled and without repeats."""
    passages: dict[str, None] = {}
    characters = 0
    for passage in _cut(documents):
        passages[passage] = None
        characters += len(passage)
        if characters > MAX_CHARACTERS:
            break
    shuffled = list(passages)
    random.Random(seed).shuffle(shuffled)
    return tuple(shuffled)


def _cut(documents: Iterable[str]) -> Iterable[str]:
    for document in documents:
        lines = document.splitlines()
        for start in range(0, len(lines), PASSAGE_LINES):
            passage = "\n".join(lines[start : start + PASSAGE_LINES]).strip()
            if len(passage) > MIN_CHARACTERS:
                yield passage


def _files(folder: Path, pattern: str) -> Iterable[str]:
    paths = (path for path in sorted(folder.glob(pattern)) if path.is_file())
    return (path.read_text(encoding="utf-8", errors="ignore") for path in paths)


def _reference() -> Iterable[str]:
    return (topics[name] for name in sorted(topics))


def _readmes() -> Iterable[str]:
    # A package's description stands below its headers.
    return (metadata(name).get_payload() for name in DESCRIBED)


BASE_KINDS: Mapping[str, Callable[[], Iterable[str]]] = {
    "standard library": lambda: _files(STDLIB, "*.py"),
    "language reference": _reference,
    "C++ core headers": lambda: _files(HEADERS, "c10/**/*.h"),
    "licences": lambda: _files(PACKAGES, "torch-*.dist-info/**/LICEN*"),
}
TENANT_KINDS: Mapping[str, Callable[[], Iterable[str]]] = {
    "algebra code": lambda: _files(PACKAGES, "sympy/[a-g]*/*.py"),
    "package READMEs": _readmes,
    "operator headers": lambda: _files(HEADERS, "ATen/native/**/*.h"),
    "character tables": lambda: _files(STDLIB, "encodings/*.py"),
}
