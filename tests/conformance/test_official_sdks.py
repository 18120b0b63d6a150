"""The official SDKs, unmodified, as the judge of the whole server."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.conformance.running import KEYS, SDKS, Report, Server, run_scenarios


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def test_a_run_is_what_was_asked_for(report: Report, server: Server) -> None:
    facts = report.facts["create"]
    assert facts["model_id"].endswith(":train:0")
    assert facts["model_name"] == server.base_model
    assert facts["models"] == [server.base_model]
    assert (facts["is_lora"], facts["lora_rank"]) == (True, 3)
    assert facts["tokens"]


def test_training_lowers_the_loss(report: Report) -> None:
    facts = report.facts["train"]
    losses = facts["losses"]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.1 * losses[0]
    assert all(norm > 0 for norm in facts["grad_norms"])
    assert facts["lengths"] == [5, 9, 13, 8]


def test_cycles_are_numbered_upwards(report: Report) -> None:
    cycles = report.facts["train"]["cycles"]
    assert cycles == sorted(set(cycles))


def test_the_asynchronous_calls_do_the_same(report: Report) -> None:
    assert report.facts["train_async"]["losses"] == report.facts["train"]["losses"][:3]


def test_a_large_batch_comes_back_whole(report: Report) -> None:
    facts = report.facts["chunked"]
    assert facts["lengths"] == facts["expected_lengths"]
    assert facts["metrics"]["loss:sum"] == pytest.approx(-facts["sum"], rel=1e-9)
    # The older one cuts after 1,024 datums, whatever the server says.
    assert ("clock_cycle:unique_1" in facts["metrics"]) == (report.sdk == "0.22.0")
    assert flat(facts["whole_ends"]) == pytest.approx(flat(facts["ends"]), rel=1e-5)
    assert facts["grad_norm"] > 0


def test_a_large_batch_that_fails_adds_nothing_where_it_is_one_request(report: Report) -> None:
    facts = report.facts["one_bad"]
    assert facts["error"] == "RequestFailedError"
    at, left = (26, facts["first_part"]) if report.sdk == "0.22.0" else (1050, 0.0)
    assert f"data[{at}].loss_fn_inputs.weights[1] is not finite" in facts["message"]
    assert facts["left"] == left


def test_a_gradient_is_dropped_by_saving_and_loading(report: Report) -> None:
    facts = report.facts["one_bad"]
    assert facts["first_part"] > 0
    assert facts["dropped"] == 0.0


def test_a_batch_in_parts_adds_up_to_the_batch(report: Report) -> None:
    facts = report.facts["accumulate"]
    # Sums in another order, then one Adam step: a few units in the last place of float32.
    assert flat(facts["bitwise"]) == pytest.approx(flat(facts["once"]), rel=1e-4)


def test_forward_changes_nothing(report: Report) -> None:
    facts = report.facts["forward"]
    assert facts["before"] == facts["after"]
    assert facts["grad_norm"] == 0.0


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_a_policy_loss_is_what_its_formula_says(report: Report, loss: str) -> None:
    facts = report.facts["losses"][loss]
    assert facts["loss"] == pytest.approx(facts["expected"], rel=1e-4)
    assert facts["logprobs"] == 12
    assert facts["grad_norm"] > 0


def test_sparse_soft_targets_weigh_as_their_dense_form(report: Report) -> None:
    facts = report.facts["soft_targets"]
    assert facts["was_sparse"]
    assert facts["shape"] == [6, 64]
    assert facts["sparse_loss"] == pytest.approx(facts["expected"], rel=1e-5)
    assert facts["sparse_loss"] == pytest.approx(facts["dense_loss"], rel=1e-5)


def test_a_loss_of_ones_own_trains_as_the_built_in_one(report: Report) -> None:
    facts = report.facts["custom"]
    assert facts["metrics"]["loss:sum"] == pytest.approx(facts["loss"], rel=1e-5)
    assert facts["metrics"]["rows"] == 4.0
    assert facts["custom"] == facts["builtin"]


def test_a_custom_loss_on_the_server_has_the_bits_of_the_client_in_one_pass(report: Report) -> None:
    facts = report.facts["custom"]
    if report.sdk == "0.22.0":
        assert "by_server" not in facts
        return
    assert facts["by_server"] == facts["by_client"]
    here, there = facts["metrics_of_client"], facts["metrics_of_server"]
    assert there["loss:sum"] == pytest.approx(here["loss:sum"], rel=1e-6)
    assert "surrogate_loss:sum" not in there  # there was no second pass
    assert there["custom/far:mean"] == pytest.approx(there["custom/far:sum"] / 4)
    assert "operator.matmul is not allowed in a custom loss" in facts["message"]


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("unknown_loss", "no_such_loss"),
        ("token", "Token id 512 at datum 0, position 1"),
        ("missing_input", "loss_fn_inputs.logprobs is missing"),
        ("learning_rate", "learning_rate"),
        ("nan", "weights[1] is not finite"),
    ],
)
def test_a_failed_request_names_its_fault_and_the_run_goes_on(report: Report, what: str, named: str) -> None:
    facts = report.facts["failures"]
    assert facts[what]["error"] == "RequestFailedError"
    assert facts[what]["category"].rpartition(".")[2].lower() == "user"
    assert named in facts[what]["message"]
    assert facts[what]["next_loss"] == facts["unknown_loss"]["next_loss"]


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("rank_0", "rank must be between 1 and"),
        ("rank_huge", "rank must be between 1 and"),
        ("base_model", "not served here"),
    ],
)
def test_a_run_that_cannot_be_is_refused_at_once(report: Report, what: str, named: str) -> None:
    assert report.facts["failures"][what]["error"] == "BadRequestError"
    assert named in report.facts["failures"][what]["message"]


def test_two_tenants_at_once_train_bit_for_bit_as_if_alone(report: Report) -> None:
    facts = report.facts["two_tenants"]
    assert facts["together"] == facts["alone"]


@pytest.mark.parametrize("sdk", SDKS)
def test_a_viewers_key_reads_and_is_told_that_it_may_not_train(server: Server, sdk: str) -> None:
    with httpx.Client(base_url=f"{server.address}/api/v1") as http:
        mine = http.get("auth/apikey/me", headers={"X-API-Key": KEYS[0]}).json()
        tenant = mine["details"]["org_details"]["name"]
        made = http.post(
            f"admin/tenants/{tenant}/keys",
            json={"name": "guest", "role": "viewer"},
            headers={"X-API-Key": (server.data_dir / "admin-key").read_text().strip()},
        )
    names, key = ["only_reads"], made.json()["key"]
    facts = run_scenarios(sdk, server.address, server.base_model, names, TINKER_API_KEY=key)
    assert facts["only_reads"]["total"] >= 0
    assert facts["only_reads"]["refused"]["error"] == "PermissionDeniedError"
    assert "can only read" in facts["only_reads"]["refused"]["message"]


def test_a_lost_answer_changes_no_bit(report: Report) -> None:
    lost = set(report.proxy.lost)
    assert {"create_model", "forward_backward", "optim_step", "retrieve_future"} <= lost
    assert report.lossy_facts["undisturbed"] == report.facts["undisturbed"]


def test_the_newer_sdk_compresses_from_afar(report: Report) -> None:
    encodings = _encodings(report.proxy.encodings, "forward_backward")
    assert encodings == ({"zstd"} if report.sdk == "0.38.0" else {None})


def _encodings(calls: set[tuple[str, Any]], endpoint: str) -> set[Any]:
    return {encoding for called, encoding in calls if called == endpoint}
