"""Record the files in this folder: `python -m tests.data.recorded.record FOLDER`.

Used for a new version of the format, or for a missing case. Existing files stay unchanged: they
prove that later versions compute the same numbers.
"""

from __future__ import annotations

import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import torch

from cotrain_workers.engine.engine import Engine
from cotrain_workers.recorder.file import read_cycle, write_cycle
from tests.support.flight import Flight, whole_story
from tests.support.tiny_models import build_tiny

HERE = Path(__file__).parent
MODEL = HERE / "model"


def record(folder: Path) -> None:
    """Record every kind of cycle once, with the base model of this folder, and compress the
    recording."""
    torch.set_num_threads(1)
    if not MODEL.exists():
        build_tiny("qwen3", MODEL, vocab=32, hidden=16, layers=1, context=64)
    flight = Flight(Engine.load(str(MODEL)), folder / "flight")
    whole_story(flight)
    for number, path in enumerate(flight.files, 1):
        cycle = read_cycle(path)
        facts = replace(cycle.facts, model=str(MODEL.relative_to(Path.cwd())))
        write_cycle(path, replace(cycle, facts=facts))
        _compress(path, folder / f"story-{number}.zip")
        path.unlink()
    flight.folder.rmdir()


def _compress(source: Path, target: Path) -> None:
    with zipfile.ZipFile(source) as stored, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))


if __name__ == "__main__":
    record(Path(sys.argv[1]))
