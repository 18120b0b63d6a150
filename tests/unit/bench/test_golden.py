"""Contents of an answer's digest, and the fields it leaves out."""

from __future__ import annotations

import numpy as np
from safetensors.numpy import save

from bench.golden import digest, without_metadata


def test_a_digest_leaves_out_the_names_of_a_run() -> None:
    told = {"model_id": "a:train:0", "loss": 1.5, "path": "tinker://a", "metrics": {"cycle": 3}}
    other = {"model_id": "b:train:0", "loss": 1.5, "path": "tinker://b", "metrics": {"cycle": 4}}
    assert digest(told) == digest(other)
    assert digest(told) != digest({**other, "loss": np.nextafter(1.5, 2)})


def test_a_digest_of_a_sample_leaves_out_the_run_of_its_policy() -> None:
    one, other = ({"sequences": [{"tokens": [1], "policy_spans": [{"training_run_id": run}]}]} for run in "ab")
    assert digest(one) == digest(other)
    assert digest(one) != digest({"sequences": [{"tokens": [2], "policy_spans": [{}]}]})


def test_a_digest_of_weights_covers_names_and_tensors() -> None:
    tensors = {"a": np.arange(6, dtype="f4")}
    assert without_metadata(save(tensors, {"run": "a"})) == without_metadata(save(tensors, {"run": "b"}))
    for changed in ({"b": tensors["a"]}, {"a": tensors["a"] + np.float32(1e-6)}):
        assert without_metadata(save(changed)) != without_metadata(save(tensors))
