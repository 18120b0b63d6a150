"""Evaluations, own metrics and kept checkpoints of the cotrain client, on a real server."""

from __future__ import annotations

import json
import math
import re

import httpx
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from cotrain import AdamParams, Datum, ModelInput, SamplingClient, SamplingParams, ServiceClient, TrainingClient
from cotrain.cli import command_line
from cotrain.errors import RequestFailed, UnsupportedInput
from cotrain.types import PolicySpan, SampledSequence
from tests.conformance.running import KEYS, Server

DATA = [
    Datum(
        model_input=ModelInput.from_ints(list(range(start, start + 8))),
        loss_fn_inputs={"target_tokens": list(range(start + 1, start + 9)), "weights": [0.0, *[1.0] * 7]},
    )
    for start in range(5)
]
STEP = AdamParams(learning_rate=1e-2)


@pytest.fixture
def run(service: ServiceClient, server: Server) -> TrainingClient:
    return service.create_lora_training_client(server.base_model, rank=4, seed=3)


def test_an_evaluation_larger_than_a_request_is_one_value_of_the_history(
    run: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run.forward(DATA, "cross_entropy").result()
    connection = run._requests._connection
    small = connection.known_config.model_copy(update={"fwdbwd_max_chunk_bytes_count": 200})
    monkeypatch.setattr(type(connection), "known_config", small)
    sent = run._requests._next_seq_id
    run.forward_backward(DATA, "cross_entropy")
    run.optim_step(STEP)
    before = run.evaluate(DATA, name="before step 2")
    run.forward_backward(DATA, "cross_entropy")
    run.optim_step(STEP)
    after = run.evaluate(DATA)
    requests = run._requests._next_seq_id - sent
    training, start_and_end = 2 * 2, 2 * 2  # of two steps, and of two evaluations
    assert requests > training + start_and_end + 2 * 2, "each evaluation has more than two parts"
    assert before.result().tokens == 35
    assert before.result().weight_sum == 35.0
    assert after.result().nll < before.result().nll < whole.metrics["loss:sum"] / 35
    assert len(after.result().loss_fn_outputs) == 5
    metrics = run.history().metrics
    assert [(p.step, p.value) for p in metrics["eval/nll"]] == [(2, after.result().nll)]
    assert [(p.step, p.value) for p in metrics["before step 2/nll"]] == [(1, before.result().nll)]
    # other parts have other last bits
    again = run.forward(DATA, "cross_entropy").result().loss
    assert math.isclose(after.result().loss, again, rel_tol=1e-6)
    with pytest.raises(UnsupportedInput, match="data is empty"):
        run.evaluate([])


def test_an_evaluation_with_a_failed_part_has_no_value(run: TrainingClient) -> None:
    bad = Datum(model_input=ModelInput.from_ints([10_000_000]), loss_fn_inputs={"target_tokens": [1], "weights": [1.0]})
    with pytest.raises(RequestFailed, match="10000000"):
        run.evaluate([*DATA, bad]).result()
    assert run.history().metrics == {}


def test_metrics_are_in_history_page_and_checkpoint_of_their_step(
    run: TrainingClient, service: ServiceClient, server: Server
) -> None:
    run.log({"reward/mean": 0.1 + 0.2, "stale": 1})
    run.forward_backward(DATA, "cross_entropy")
    run.optim_step(STEP)
    run.evaluate(DATA)
    run.log({"reward/mean": 1 / 3})
    saved = run.save_state("with-metrics")
    path = saved.result().path
    history = run.history()
    assert [(p.step, p.value) for p in history.metrics["reward/mean"]] == [(0, 0.1 + 0.2), (1, 1 / 3)]
    [kept] = service.create_rest_client().list_checkpoints(run.model_id).result().checkpoints
    assert (kept.tinker_path, kept.step) == (path, 1)
    assert kept.metrics == {"reward/mean": 1 / 3, "eval/nll": history.metrics["eval/nll"][0].value}
    with httpx.Client(base_url=server.address) as browser:
        browser.post("/ui/login", data={"key": KEYS[0]})
        page = browser.get(f"/ui/runs/{run.model_id}.json").json()
    assert [chart["heading"] for chart in page["charts"]][-3:] == ["eval/nll", "reward/mean", "stale"]


def test_a_save_keeps_the_newest_and_the_best_checkpoints(run: TrainingClient, service: ServiceClient) -> None:
    rest = service.create_rest_client()
    saves = []
    for number, value in enumerate([0.5, 0.1, 0.7, 0.3, 0.9]):
        run.log({"eval/nll": value})
        saves.append(run.save_state(f"s{number}", keep="last:2, best:eval/nll:1"))
        run.train(DATA[:1])
    for saved in saves:
        saved.result()
    named = [each.checkpoint_id for each in rest.list_checkpoints(run.model_id).result().checkpoints]
    assert named == ["weights/s4", "weights/s3", "weights/s1"]
    gone = [f"tinker://{run.model_id}/weights/{name}" for name in ("s3", "s1", "never")]
    assert service.delete_checkpoints(gone) == gone[:2]
    with pytest.raises(UnsupportedInput, match="'best:2' is no rule"):
        run.save_state("x", keep="last:3, best:2")


def test_a_bad_metric_is_refused_by_name(run: TrainingClient) -> None:
    with pytest.raises(UnsupportedInput, match=r"metrics\['reward'\] is nan: it must be a finite"):
        run.log({"reward": float("nan")})
    with pytest.raises(ValidationError, match="pattern"):
        run.log({"a:b": 1.0})
    for first in (0, 64):
        run.log({f"m{number}": 1.0 for number in range(first, first + 64)}).result()
    with pytest.raises(RequestFailed, match="'more' would be one name too many"):
        run.log({"more": 1.0}).result()
    run.log({"m1": 2.0}).result()


def test_an_idle_run_has_a_cause_and_another_tenant_does_not_read_it(
    run: TrainingClient, service: ServiceClient, server: Server
) -> None:
    run.log({"reward": 1.0}).result()
    found = service.create_rest_client().get_wait_reason(run.model_id).result()
    assert (found.cause, found.training_run_id) == ("idle", run.model_id)
    foreign = {"X-API-Key": KEYS[1]}
    path = f"{server.address}/api/v1/training_runs/{run.model_id}/why"
    assert httpx.get(path, headers=foreign).status_code == 404


def test_the_workers_of_a_server_in_use_pass_their_self_check(run: TrainingClient, server: Server) -> None:
    training = [run.train(DATA) for _ in range(3)]
    sampler = run.save_weights_and_get_sampling_client()
    samples = sampler.sample(ModelInput.from_ints([5]), 2, SamplingParams(max_tokens=100))
    where = ["--base-url", server.address, "--data-dir", str(server.data_dir), "--json"]
    found = CliRunner().invoke(command_line([]), ["selfcheck", *where], env={"COTRAIN_ADMIN_KEY": ""})
    assert found.exit_code == 0, found.output
    [row] = json.loads(found.output)
    assert (row["ok"], row["runs"], row["logprobs"], row["problem"]) == (True, 6, 0.0, "")
    assert (row["samples"], row["tokens"]) == (0.0, 748)
    assert len(samples.result().sequences) == 2
    key = (server.data_dir / "admin-key").read_text().strip()
    path = f"{server.address}/metrics/fleet"
    metrics = httpx.get(path, headers={"Authorization": f"Bearer {key}"}).text
    assert re.search(r"cotrain_worker_self_check_ok\{.*\} 1.0", metrics)
    assert re.search(r'cotrain_worker_self_check_difference\{kind="samples".*\} 0.0', metrics)
    for each in training:
        each.result()


def test_samples_name_their_policy_and_a_pass_the_steps_since(
    run: TrainingClient, service: ServiceClient, server: Server
) -> None:
    def data(old: SampledSequence, new: SampledSequence) -> list[Datum]:
        return [
            Datum(
                model_input=ModelInput.from_ints([5, *each.tokens[:-1]]),
                loss_fn_inputs={
                    "target_tokens": each.tokens,
                    "logprobs": each.logprobs,
                    "advantages": [1.0] * len(each.tokens),
                    "policy_step": each.policy_steps,
                },
            )
            for each in (old, new)
        ]

    def sampled(sampler: SamplingClient, tokens: int) -> SampledSequence:
        params = SamplingParams(max_tokens=tokens, stop=[])
        return sampler.sample(ModelInput.from_ints([5]), 1, params).result().sequences[0]

    first = sampled(run.save_weights_and_get_sampling_client(), 4)
    span = {"start": 0, "end": 4, "training_run_id": run.model_id, "step": 0}
    assert first.policy_spans
    assert [each.model_dump() for each in first.policy_spans] == [span]
    for _ in range(3):
        run.forward_backward(DATA, "cross_entropy")
        run.optim_step(STEP)
    path = run.save_weights_for_sampler("third").result().path
    third = sampled(service.create_sampling_client(model_path=path), 2)
    assert third.policy_steps == [3, 3]
    base = sampled(service.create_sampling_client(base_model=server.base_model), 1)
    assert base.policy_spans == [PolicySpan(start=0, end=1)]

    metrics = run.forward_backward(data(first, third), "ppo").result().metrics
    assert metrics["policy_lag:mean"] == 2.0  # four tokens of three steps ago, two of now
    assert metrics["policy_lag:max"] == 3.0
    run.optim_step(STEP).result()
    point = run.history().points[-1]
    assert (point.policy_lag, point.policy_lag_max) == (2.0, 3.0)
    assert "policy_lag" not in run.history().points[0].model_dump(exclude_none=True)
    run.rewind(2)
    metrics = run.forward(data(first, third), "ppo").result().metrics
    assert metrics["policy_lag:mean"] == 1.0  # the second policy is of an abandoned step
    wrong = first.model_copy(update={"policy_spans": [PolicySpan(start=0, end=4, step=-2)]})
    with pytest.raises(RequestFailed, match=r"policy_step\[0\] is -2, but must be an optimizer step"):
        run.forward(data(wrong, third), "ppo").result()


def test_a_rewound_run_trains_like_one_that_never_went_on(run: TrainingClient, service: ServiceClient) -> None:
    first = [run.train(DATA[:2], learning_rate=1e-2) for _ in range(4)]
    run.log({"reward": 1.0})
    back = run.rewind(2)
    second = [run.train(DATA[:2], learning_rate=1e-2) for _ in range(2)]
    assert (back.result().step, back.result().seq) == (2, 4)
    assert [each.result().loss for each in second] == [each.result().loss for each in first[2:]]
    history = run.history()
    assert ([point.step for point in history.points], history.metrics) == ([1, 2, 3, 4], {})
    assert service.create_rest_client().get_training_run(run.model_id).result().rewind_from == 0
    with pytest.raises(RequestFailed, match="go back to steps 0 to 4"):
        run.rewind(9).result()
