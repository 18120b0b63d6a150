"""Logs of a server: every line is JSON, and request ids of users lead to their failures."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from cotrain import Datum, ModelInput, RequestFailed, ServiceClient
from cotrain.exceptions import APIStatusError
from tests.integration.test_serve import PATIENCE_S, pids, train
from tests.support.serving import Serving

PROCESSES = {"api", "redis", "scheduler", "worker-w0"}


def test_failures_and_cycles_are_found_by_id_in_json_logs(tmp_path: Path, tiny_model: Path) -> None:
    with Serving(
        tmp_path, [str(tiny_model)], ["tml-given-0123456789"], ["--log-level=debug"]
    ) as serving:
        key = "tml-given-0123456789"
        assert "worker-w0: loading its weights" in serving.log
        with ServiceClient(base_url=serving.address, api_key=key) as service:
            run = service.create_lora_training_client(str(tiny_model), rank=4)
            train(run)
            os.kill(pids(serving)["worker-w0"], signal.SIGKILL)
            failures = [failure_of(run.forward_backward([wrong()], "cross_entropy"))]
            with pytest.raises(APIStatusError) as refused:
                service.create_lora_training_client("no/such-model", rank=4)
            assert refused.value.status_code == 400
            run_id = run.model_id
        assert serving.stop() == 0
    lines = {path.stem: path.read_text().splitlines() for path in (tmp_path / "logs").glob("*.log")}
    assert lines.keys() >= PROCESSES
    for name, written in lines.items():
        for line in written:
            assert next(iter(json.loads(line))) == "ts", (name, line)
            assert json.loads(line)["process"] == name
            assert "%|" not in line  # of a progress bar
    for failure in failures:
        assert failure.request_id
        found = {
            json.loads(line)["event"]
            for written in lines.values()
            for line in written
            if failure.request_id in line
        }
        assert found >= {
            "request_accepted", "cycle_planned", "cycle_committed", "request_failed",
            "failure_answered",
        }  # fmt: skip
    [failed] = [json.loads(line) for line in lines["worker-w0"] if "request_failed" in line]
    assert failed["run"] == run_id
    assert failed["tenant_name"]
    assert failed["category"] == "user"
    assert any('"code": 400' in line for line in lines["api"])


def wrong() -> Datum:
    """Return a datum with a token outside the vocabulary."""
    return Datum(
        model_input=ModelInput.from_ints([1, 10**6]),
        loss_fn_inputs={"target_tokens": [2, 3], "weights": [1.0, 1.0]},
    )


def failure_of(future: object) -> RequestFailed:
    with pytest.raises(RequestFailed) as failed:
        future.result(PATIENCE_S)  # type: ignore[attr-defined]  # of any call
    return failed.value
