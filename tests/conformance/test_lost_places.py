"""Requests that SDK 0.22 numbers but cannot encode: later requests fail and report the reason."""

from __future__ import annotations

import httpx
import pytest

from tests.conformance.running import KEYS, Facts, Server, run_scenarios
from tests.support.serving import Serving

OLD = "0.22.0"


@pytest.fixture(scope="module")
def met(server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Facts, Facts]:
    """Facts of the SDK on a server that waits two seconds for a lost request, and the server's
    status afterwards."""
    settings = {"COTRAIN_GAP_LIMIT_S": "2"}
    folder = tmp_path_factory.mktemp("impatient")
    with Serving(folder, [server.base_model], KEYS, settings=settings) as impatient:
        facts = run_scenarios(OLD, impatient.address, server.base_model, ["unsent"])
        status = httpx.get(f"{impatient.address}/status", headers=impatient.operator)
        return facts["unsent"], status.json()


def test_the_sdk_reports_the_request_that_it_cannot_send(met: tuple[Facts, Facts]) -> None:
    assert met[0]["itself"]["error"] == "ValueError"


@pytest.mark.parametrize("which", ["behind", "later"])
def test_later_requests_fail_and_report_the_remedy(met: tuple[Facts, Facts], which: str) -> None:
    failure = met[0][which]
    assert failure["error"] == "RequestFailedError"
    assert "seq_id 1 of this run never reached the server" in failure["message"]
    assert "a new training client from the last checkpoint" in failure["message"]


def test_a_new_training_client_can_continue(met: tuple[Facts, Facts]) -> None:
    assert met[0]["next_loss"] > 0


def test_requests_that_were_given_up_are_in_no_queue(met: tuple[Facts, Facts]) -> None:
    [pool] = met[1]["pools"]
    assert (pool["queue"]["ops"], pool["queue"]["oldest_gap_s"]) == (0, 0.0)
