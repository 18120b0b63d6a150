"""A hybrid through the official SDK and our client, with a worker that is killed within a rewind."""

from __future__ import annotations

import random
from pathlib import Path

from cotrain import Datum, ModelInput, ServiceClient, TrainingClient, types
from tests.conformance.running import CHECKPOINTS, KEYS, NEWER, run_scenarios
from tests.support.serving import Serving
from tests.support.tiny_models import build_tiny


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
