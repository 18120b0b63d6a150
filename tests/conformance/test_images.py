"""Models with images and hybrids, through the official SDK and our client, with a worker that is killed."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from cotrain import Datum, ModelInput, ServiceClient, TrainingClient, types
from tests.conformance.running import CHECKPOINTS, KEYS, NEWER, run_scenarios
from tests.support.chat_model import build_seeing_model
from tests.support.notebook import run_page
from tests.support.pictures import picture
from tests.support.serving import Serving
from tests.support.tiny_models import build_tiny

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "images.md"


def pictured(chunks: list[types.ImageChunk]) -> types.Datum:
    text = types.EncodedTextChunk(tokens=[5, 6, 7])
    parts = [text, *(part for chunk in chunks for part in (chunk, text))]
    at = np.arange(3 + 9 * len(chunks))
    inputs = {"target_tokens": at % 100, "weights": (at % 2).astype(np.float32)}
    return types.Datum(types.ModelInput(chunks=parts), inputs)


def test_images_train_and_sample_beside_text_and_survive_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(build_seeing_model(tmp_path / "tiny"))
    kills = {
        # The first computed pass has images, as has the first claimed sample.
        "COTRAIN_FAILPOINTS": "worker.before_commit=kill@2,sample.claimed=kill",
        "COTRAIN_FAILPOINTS_LOG": str(tmp_path / "failpoints"),
    }
    with Serving(tmp_path / "data", [model], KEYS, settings=kills) as serving:
        names = ["trained", "text_alone"]
        facts = run_scenarios("0.38.0", serving.address, model, names, "image_scenarios")
        log = serving.log
        first = facts["trained"]

        png, jpeg = (picture(seed, 24, 16, kind) for seed, kind in ((0, "PNG"), (1, "JPEG")))
        image = types.ImageChunk(data=png, format="png", expected_tokens=6)
        photo = types.ImageChunk(data=jpeg, format="jpeg")  # the server counts its tokens
        data = [pictured([image, photo]), pictured([image])]
        with ServiceClient(serving.address, KEYS[2]) as client:
            run = client.create_lora_training_client(model, rank=4, seed=7)
            for _ in range(2):
                run.forward_backward(data, "cross_entropy")
                run.optim_step(types.AdamParams(learning_rate=1e-2))
            scored = run.forward(data, "cross_entropy").result()
            sampler = run.save_weights_and_get_sampling_client("pictured")
            params = types.SamplingParams(max_tokens=4, temperature=0.0)
            sample = sampler.sample(data[0].model_input, 1, params).result()

        monkeypatch.setenv("COTRAIN_BASE_URL", serving.address)
        monkeypatch.setenv("COTRAIN_API_KEY", KEYS[0])
        monkeypatch.chdir(tmp_path)
        (tmp_path / "photo.jpg").write_bytes(jpeg)
        run_page(PAGE, {"Qwen/Qwen3-VL-4B-Instruct": model})

    assert log.count("SIGKILL") == 2
    assert first["text"] == facts["text_alone"]["text"]
    ours = [outputs["logprobs"].tolist() for outputs in scored.loss_fn_outputs]
    assert ours == first["logprobs"]
    assert list(sample.sequences[0].tokens) == first["tokens"]
    assert list(sample.sequences[0].logprobs or ()) == first["sampled"]
    assert len(first["prompt"]) == 21
    where = "data[0].model_input.chunks[1]"
    assert f"{where} cannot be decoded: image file is truncated." in first["cut"]["message"]
    assert "prompt.chunks[0] has expected_tokens=7, but 6 tokens" in first["counted"]["message"]


def train(run: TrainingClient, steps: range) -> list[float]:
    """Train steps by Muon, each on its own datum; return the losses."""
    losses = []
    for step in steps:
        row = random.Random(step).choices(range(512), k=20)
        inputs = {"target_tokens": row[1:], "weights": [1.0] * 19}
        passed = run.forward_backward([Datum(ModelInput.from_ints(row[:-1]), inputs)], "cross_entropy")
        run.optim_step(types.MuonParams(learning_rate=1e-2)).result()
        losses.append(passed.result().metrics["loss:sum"])
    return losses


def test_a_hybrid_trains_saves_samples_and_resumes_over_a_kill(tmp_path: Path) -> None:
    model = str(build_tiny("granitemoehybrid", tmp_path / "tiny", vocab=512))
    kills = {"COTRAIN_FAILPOINTS": "worker.rewound=kill", "COTRAIN_FAILPOINTS_LOG": str(tmp_path / "failpoints")}
    with Serving(tmp_path / "data", [model], KEYS, settings=kills) as serving:
        names = ["restored", "sampled"]
        facts = run_scenarios(NEWER, serving.address, model, names, CHECKPOINTS)
        with ServiceClient(serving.address, KEYS[2]) as client:
            muon = types.MuonOptimizerConfig()
            run = client.create_lora_training_client(model, rank=4, seed=7, optimizer=muon)
            losses = train(run, range(4))
            assert run.rewind(1).result().step == 1
            assert train(run, range(1, 4)) == losses[1:]
        log = serving.log

    assert log.count("SIGKILL") == 1
    restored = facts["restored"]
    assert restored["halfway"] == restored["loaded"] == restored["created"] != restored["astray"]
    assert restored["end"] == restored["loaded_end"] == restored["created_end"]
    sampled = facts["sampled"]
    assert sampled["now"] == sampled["training"] == sampled["sampler"] != sampled["base"]
