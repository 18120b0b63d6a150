"""Traces and logs of a real server: requests, plans, cycles and ops as one tree, without tenants'
content, and log lines in JSON that the id of a request finds."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from cotrain import AdamParams, Datum, ModelInput, RequestFailed, SamplingParams, ServiceClient, TrainingClient
from cotrain.exceptions import APIStatusError
from tests.integration.test_serve import PATIENCE_S, pids, train
from tests.support.otlp_receiver import Received, Receiver
from tests.support.serving import Serving

KEYS = ("tml-first-0123456789", "tml-second-0123456789")
CANARY_TOKEN, WRONG_TOKEN = 433, 987654321
#: After two runs and four requests of the first step.
KILLED_AT = 8
OP_KINDS = {"create", "forward_backward", "optim_step"}
PROCESSES = {"api", "redis", "scheduler", "worker-w0"}


@dataclass(frozen=True)
class Watched:
    """Traces and logs of a stopped server."""

    spans: list[Received]
    printed: str
    """Output of the supervisor."""
    logs: dict[str, list[str]]
    """Lines by process."""
    failed: RequestFailed
    failed_run: str


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Watched:
    """A step of two tenants, sent together, and some more requests.

    The worker is killed in the middle of some cycle and starts again.
    """
    folder = tmp_path_factory.mktemp("traced")
    with Receiver() as receiver:
        faults = {
            "COTRAIN_FAILPOINTS": f"worker.before_commit=kill@{KILLED_AT}",
            "COTRAIN_FAILPOINTS_LOG": str(folder / "moments"),
        }
        # FastAPI would send its own spans under another name.
        settings = {**receiver.settings, **faults, "FASTAPI_OTEL_AUTO_CONFIGURE": "true"}
        data, options = folder / "data", ["--log-level=debug"]
        with Serving(data, [str(tiny_model)], KEYS, options, settings) as serving:
            services = [ServiceClient(base_url=serving.address, api_key=key) for key in KEYS]
            runs = [each.create_lora_training_client(str(tiny_model), rank=4) for each in services]
            step_of_both(runs, serving, receiver)
            sampler = services[1].create_sampling_client(base_model=str(tiny_model))
            prompt, params = (ModelInput.from_ints([1, CANARY_TOKEN]), SamplingParams(max_tokens=5, seed=1))
            sampler.sample(prompt, 2, params).result(PATIENCE_S)
            while commits(folder / "moments") < KILLED_AT:
                for run in runs:
                    train(run)
            with pytest.raises(RequestFailed) as failed:
                runs[0].forward_backward([datum(WRONG_TOKEN)], "cross_entropy").result(PATIENCE_S)
            with pytest.raises(APIStatusError, match="not served here"):
                services[0].create_lora_training_client("no/such-model", rank=4)
            train(runs[0])
            receiver.wait_for(lambda spans: any(s.is_error for s in spans))
            for each in services:
                each.close()
            assert serving.stop() == 0
        logs = {path.stem: path.read_text().splitlines() for path in (data / "logs").glob("*.log")}
        return Watched(list(receiver.spans), serving.log, logs, failed.value, runs[0].model_id)


@pytest.fixture(scope="module")
def traced(watched: Watched) -> list[Received]:
    return watched.spans


def test_failures_and_cycles_are_found_by_id_in_json_logs(watched: Watched) -> None:
    assert "worker-w0: loading its weights" in watched.printed
    assert watched.logs.keys() >= PROCESSES
    request, found = watched.failed.request_id, set()
    assert request
    for name, written in watched.logs.items():
        for line in written:
            entry = json.loads(line)
            assert next(iter(entry)) == "ts", (name, line)
            assert entry["process"] == name
            assert "%|" not in line  # of a progress bar
            if request in line:
                found.add(entry["event"])
    assert found >= {
        "request_accepted", "cycle_planned", "cycle_committed", "request_failed", "failure_answered",
    }  # fmt: skip
    [failed] = [json.loads(line) for line in watched.logs["worker-w0"] if "request_failed" in line]
    assert failed["run"] == watched.failed_run
    assert failed["tenant_name"]
    assert failed["category"] == "user"
    assert any('"code": 400' in line for line in watched.logs["api"])


def commits(moments: Path) -> int:
    """Count the requests that a worker was about to commit."""
    return sum(line.startswith("worker.before_commit") for line in moments.read_text().splitlines())


def datum(token: int = CANARY_TOKEN) -> Datum:
    return Datum(
        model_input=ModelInput.from_ints([1, CANARY_TOKEN, token]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )


def step_of_both(runs: Sequence[TrainingClient], serving: Serving, receiver: Receiver) -> None:
    """Run a step of each run, sent while no scheduler plans."""
    scheduler = pids(serving)["scheduler"]
    os.kill(scheduler, signal.SIGSTOP)
    try:
        futures = [
            future
            for run in runs
            for future in (
                run.forward_backward([datum()], "cross_entropy"),
                run.optim_step(AdamParams(learning_rate=1e-2)),
            )
        ]
        receiver.wait_for(lambda spans: sum("optim_step" in s.name for s in spans) == 2)
    finally:
        os.kill(scheduler, signal.SIGCONT)
    for future in futures:
        future.result(PATIENCE_S)


def test_a_step_of_two_tenants_is_one_tree_with_one_cycle(traced: list[Received]) -> None:
    of_step = next(s for s in traced if s.name == "optim_step" and s.attributes["cotrain.seq"] == 2)
    spans = connected(traced, of_step)
    names = Counter(span.name for span in spans)
    [cycle] = [span for span in spans if span.name == "cycle"]
    [plan] = [span for span in spans if span.name == "plan"]
    posts = [span for span in spans if span.name.startswith("POST ")]
    ops = [span for span in spans if span.name in OP_KINDS]
    assert names["forward_backward"] == names["optim_step"] == 2
    assert names["retrieve_future"] == 4
    assert {span.name for span in posts} == {"POST /api/v1/forward_backward", "POST /api/v1/optim_step"}
    assert (cycle.parent, plan.parent) == (plan.id, "")
    assert set(cycle.links) == {post.id for post in posts}
    assert {span.parent for span in ops} == {span.id for span in posts}
    assert {span.links for span in ops} == {(cycle.id,)}
    assert len({span.attributes["cotrain.tenant"] for span in ops}) == 2
    assert {
        "restore", "read_bodies", "wave", "optim", "commit"
    } <= {span.name for span in spans if span.parent == cycle.id}  # fmt: skip


def test_a_sample_is_one_tree_of_its_post_its_wait_and_its_decoding(traced: list[Received]) -> None:
    [sample] = [span for span in traced if span.name == "sample"]
    spans = connected(traced, sample)
    [post] = [span for span in spans if span.name == "POST /api/v1/asample"]
    [queue] = [span for span in spans if span.name == "queue"]
    [decode] = [span for span in spans if span.name == "decode"]
    assert (post.service, sample.service) == ("cotrain-api", "cotrain-worker")
    assert (sample.parent, queue.parent, decode.parent) == (post.id, sample.id, sample.id)
    assert sample.began <= queue.began <= queue.ended <= decode.began < decode.ended <= sample.ended
    assert decode.attributes["cotrain.sampled_tokens"] == 10
    assert decode.attributes["cotrain.prompt_tokens"] == 2
    assert "cotrain.failure" not in sample.attributes


def test_every_span_has_an_existing_parent(traced: list[Received]) -> None:
    known = {span.id: span for span in traced}
    for span in traced:
        assert not span.parent or known[span.parent].trace == span.trace
        assert set(span.links) <= known.keys()
        assert span.began <= span.ended
    assert len(known) == len(traced)


def test_a_killed_worker_left_no_span_and_its_successor_reports_replays(traced: list[Received]) -> None:
    cycles = [span for span in traced if span.name == "cycle"]
    assert max(Counter(span.attributes["cotrain.cycle"] for span in cycles).values()) == 1
    crashes = [span.attributes["cotrain.crashes"] for span in cycles]
    assert [count for count in crashes if count] == [1]
    ops = Counter(span.attributes["cotrain.request"] for span in traced if span.name in OP_KINDS)
    assert set(ops.values()) == {1}


def test_spans_contain_names_and_numbers_and_no_content_of_tenants(traced: list[Received]) -> None:
    for span in traced:
        text = f"{span.name} {span.attributes}"
        assert not any(key in text for key in KEYS)
        assert CANARY_TOKEN not in span.attributes.values()
        assert str(WRONG_TOKEN) not in text
    [failed] = [span for span in traced if span.is_error and span.service == "cotrain-worker"]
    assert (failed.name, failed.attributes["cotrain.failure"]) == ("rejected", "user")
    assert {span.service for span in traced} == {"cotrain-api", "cotrain-scheduler", "cotrain-worker"}


def connected(spans: Sequence[Received], first: Received) -> list[Received]:
    """Return all spans that are reachable from the first one by parents and links, in either
    direction."""
    groups = [{span.id, span.parent, *span.links} - {""} for span in spans]
    reached = {first.id}
    while more := {each for near in groups if near & reached for each in near} - reached:
        reached |= more
    return [span for span in spans if span.id in reached]
