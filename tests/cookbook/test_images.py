"""The classifier of images, unmodified, on a tiny model with a vision tower and a folder of pictures."""

from __future__ import annotations

from pathlib import Path

import PIL.Image
import pytest

from tests.cookbook.programs import Bench
from tests.support.chat_model import build_seeing_model
from tests.support.serving import Serving

KEY = "tml-look_c2VjcmV0LW9mLWxvb2s"
MODEL = "Qwen/Qwen3-VL-8B-Instruct"
COLORS = ("red", "blue")


def build_workshop(folder: Path) -> Path:
    """Write a model, and pictures of one color for each class, under the names on the hub."""
    build_seeing_model(folder / MODEL)
    for split, count in (("train", 8), ("test", 2)):
        for color in COLORS:
            place = folder / "dpdl-benchmark/caltech101" / split / color
            place.mkdir(parents=True)
            for number in range(count):
                size = (20 + 4 * number, 30)
                PIL.Image.new("RGB", size, color).save(place / f"{number}.jpg")
    return folder


@pytest.mark.cookbook
def test_the_classifier_of_images_learns(tmp_path: Path) -> None:
    workshop = build_workshop(tmp_path / "workshop")
    with Serving(tmp_path / "data", [f"{MODEL}={workshop / MODEL}"], [KEY]) as serving:
        bench = Bench(serving.address, KEY, tmp_path / "data", workshop, tmp_path / "logs")
        ran = bench.run(
            "vlm_classifier.train",
            "vlm",
            base_url=serving.address,
            model_name=MODEL,
            renderer_name="qwen3_vl_instruct",
            batch_size=8,
            num_epochs=6,
            lora_rank=8,
            learning_rate=1e-2,
            eval_every=4,
            n_eval=4,
            max_tokens=24,
        )
        complaints = bench.complaints()
    assert ran.status == 0, ran.output
    assert complaints == []
    accuracy = [row["accuracy"] for row in ran.steps if "accuracy" in row]
    assert (accuracy[0], accuracy[-1]) == (0.0, 1.0)  # by the pictures: the texts are the same
    losses = ran.series("train_mean_nll")
    assert losses[-1] < losses[0] / 10
