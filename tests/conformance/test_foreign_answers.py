"""Clients whose server answers wrongly: foreign answers, and requests that cannot be sent. No bit changes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cotrain import AdamParams, ServiceClient
from cotrain.errors import APIStatusError, ForeignAnswer
from cotrain.transport.responses import RetryPolicy
from cotrain.types import ModelInput, SamplingParams
from tests.conformance.running import KEYS, Facts, Server, run_scenarios
from tests.conformance.test_cotrain_client import datum, logprobs
from tests.support.draws import variant
from tests.support.proxies import FOREIGN, PAGE, Answer, SwappingProxy
from tests.support.serving import Serving

DATA = [datum(6, 1)]
QUICK = RetryPolicy(first_delay_s=0.01)
SOON = RetryPolicy(first_delay_s=0.01, give_up_after_s=0.1)
SUBMITS = ["forward_backward", "optim_step", "save_weights", "load_weights", "asample", "unload_model"]
OPENING = ["create_session", "create_model", "create_sampling_session"]
POLLS = ["retrieve_future", "retrieve_futures", "get_info"]


@pytest.fixture(scope="module")
def proxy(server: Server) -> Iterator[SwappingProxy]:
    with SwappingProxy(server.address) as standing:
        yield standing


def whole_life(service: ServiceClient, base_model: str) -> list[list[float]]:
    """Train, save, load and sample; the log-probs of a last pass."""
    run = service.create_lora_training_client(base_model, rank=4, seed=1)
    run.forward_backward(DATA, "cross_entropy")
    stepped = run.optim_step(AdamParams(learning_rate=0.01))
    saved = run.save_state("kept").result(timeout=60)
    run.load_state(saved.path).result(timeout=60)
    last = run.forward(DATA, "cross_entropy").result(timeout=60)
    assert stepped.result(timeout=60).metrics
    sampler = service.create_sampling_client(base_model=base_model)
    params = SamplingParams(max_tokens=2)
    assert sampler.sample(ModelInput.from_ints([1, 2]), 1, params).result(timeout=60).sequences
    assert run.get_info().model_data.model_name == base_model
    run.unload()
    return logprobs(last)


@pytest.fixture(scope="module")
def expected(server: Server) -> list[list[float]]:
    with ServiceClient(server.address, KEYS[0]) as service:
        return whole_life(service, server.base_model)


@pytest.mark.parametrize("kind", ["login after the server", variant("redirect"), variant("maintenance"), "cut"])
def test_one_foreign_answer_to_everything_changes_no_bit(
    proxy: SwappingProxy, server: Server, expected: list[list[float]], kind: str
) -> None:
    with ServiceClient(proxy.address, KEYS[0], policy=QUICK) as service:
        service.get_server_capabilities()  # from here on the server is known
        proxy.swaps = {path: [FOREIGN[kind]] for path in (*SUBMITS, *OPENING, *POLLS)}
        assert whole_life(service, server.base_model) == expected
    assert all(not left for path, left in proxy.swaps.items() if path != "retrieve_futures")


@pytest.mark.parametrize("refusal", [Answer(403, b"<html>", PAGE), Answer(404, b"no")])
def test_a_page_that_refuses_a_poll_fails_no_step(proxy: SwappingProxy, server: Server, refusal: Answer) -> None:
    with ServiceClient(proxy.address, KEYS[0], policy=QUICK) as service:
        run = service.create_lora_training_client(server.base_model, rank=4)
        proxy.swaps = {"retrieve_future": [refusal] * 3}
        assert run.optim_step(AdamParams(learning_rate=0.01)).result(timeout=60).metrics
        assert proxy.swaps == {"retrieve_future": []}


def test_foreign_answers_that_do_not_end_fail_one_call_and_no_later_one(proxy: SwappingProxy, server: Server) -> None:
    with ServiceClient(proxy.address, KEYS[0], policy=SOON) as service:
        run = service.create_lora_training_client(server.base_model, rank=4)
        proxy.swaps = {"optim_step": [FOREIGN["login"]] * 1_000}
        lost = run.optim_step(AdamParams(learning_rate=0.01))
        behind = run.forward(DATA, "cross_entropy")  # the server has it, and waits for the step
        with pytest.raises(ForeignAnswer, match=r"a web page came back: a proxy.*tried") as failure:
            lost.result(timeout=60)
        assert "no cotrain server" not in str(failure.value)
        assert behind.result(timeout=60).loss > 0
        proxy.swaps = {}
        assert run.optim_step(AdamParams(learning_rate=0.01)).result(timeout=60).metrics


def test_a_body_that_is_too_large_for_nginx_names_its_setting(proxy: SwappingProxy, server: Server) -> None:
    with ServiceClient(proxy.address, KEYS[0], policy=QUICK) as service:
        run = service.create_lora_training_client(server.base_model, rank=4)
        proxy.swaps = {"forward_backward": [Answer(413, b"<html>413</html>", PAGE)]}
        with pytest.raises(APIStatusError, match="client_max_body_size") as failure:
            run.forward(DATA, "cross_entropy").result(timeout=60)
        assert "no cotrain server" not in str(failure.value)
        assert run.forward(DATA, "cross_entropy").result(timeout=60).loss > 0


def test_lists_and_downloads_outlive_a_foreign_answer(proxy: SwappingProxy, server: Server, tmp_path: Path) -> None:
    with ServiceClient(proxy.address, KEYS[0], policy=QUICK) as service:
        run = service.create_lora_training_client(server.base_model, rank=4)
        path = run.save_state("to-fetch").result(timeout=60).path
        name = path.removeprefix("tinker://").replace("/", "/checkpoints/", 1)
        where = f"training_runs/{name}/archive".replace(":", "%3A")
        proxy.swaps = {
            "checkpoints": [FOREIGN["maintenance"]],
            where: [FOREIGN["redirect"]],
            f"training_runs/{name}".replace(":", "%3A"): [FOREIGN["login"]],
        }
        assert path in [each.tinker_path for each in service.list_checkpoints()]
        service.download_checkpoint_archive(path, tmp_path / "a.tar")
        assert (tmp_path / "a.tar").stat().st_size > 1_000
        service.delete_checkpoint(path)
        assert all(not left for left in proxy.swaps.values())
        assert path not in [each.tinker_path for each in service.list_checkpoints()]


def _use(service: ServiceClient, said: multiprocessing.Queue[str]) -> None:
    try:
        service.get_server_capabilities()
    except Exception as error:  # noqa: BLE001  # named by the test
        said.put(f"{type(error).__name__}: {error}")
    service.close()


def test_a_client_says_after_a_fork_that_its_thread_stayed_behind(server: Server) -> None:
    forked = multiprocessing.get_context("fork")
    said: multiprocessing.Queue[str] = forked.Queue()
    with ServiceClient(server.address, KEYS[0]) as service:
        service.get_server_capabilities()
        child = forked.Process(target=_use, args=(service, said))
        child.start()
        assert "ClientClosed: this client was made before this process was forked" in said.get(timeout=30)
        child.join(30)
        assert child.exitcode == 0
        service.get_server_capabilities()


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
