"""Features of the cotrain client beyond the plain loop, on a real server: alpha, custom losses,
train, MinT."""

from __future__ import annotations

import asyncio
import random
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import cotrain.mint as mintx
from cotrain import AdamParams, Datum, ModelInput, RequestFailed, SamplingParams, ServiceClient, TrainingClient, types
from tests.conformance.running import KEYS, Report, Server
from tests.support.waiting import until

VOCAB = 512
TOKENS = random.Random(0).choices(range(VOCAB), k=25)
DATUM = Datum(
    model_input=ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * 24}
)
RATE = 1e-2
STEP = AdamParams(learning_rate=RATE)
ALPHA = 7.5


def logprobs(run: TrainingClient, data: tuple[Datum, ...] = (DATUM,)) -> list[list[float]]:
    output = run.forward(data, "cross_entropy").result()
    return [outputs["logprobs"].tolist() for outputs in output.loss_fn_outputs]


def trained(service: ServiceClient, server: Server, alpha: float = ALPHA) -> TrainingClient:
    run = service.create_lora_training_client(server.base_model, rank=4, seed=1, alpha=alpha, dropout=0)
    for _ in range(2):
        run.forward_backward([DATUM], "cross_entropy")
        run.optim_step(STEP)
    return run


def for_sampler(run: TrainingClient) -> str:
    path = run.save_weights_for_sampler("now").result().path
    assert path is not None
    return path


# ---- Alpha ---------------------------------------------------------------------------------------


def test_a_run_with_another_alpha_computes_the_same_as_plain_peft(
    service: ServiceClient, server: Server, tmp_path: Path
) -> None:
    run = trained(service, server)
    path = run.save_state().result().path
    service.download_checkpoint(path, tmp_path)

    base: Any = AutoModelForCausalLM.from_pretrained(server.base_model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names that transformers has deprecated
        model: Any = PeftModel.from_pretrained(base, tmp_path)
    assert model.peft_config["default"].lora_alpha == ALPHA
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TOKENS[:-1]])).logits[0]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    assert np.abs(np.array(logprobs(run)[0]) - expected.numpy()).max() < 1e-5
    assert run.get_info().lora_alpha == ALPHA
    sampler = service.create_sampling_client(for_sampler(run))
    scores = sampler.compute_logprobs(ModelInput.from_ints(TOKENS)).result()
    assert np.abs(np.array(scores[1:]) - expected.numpy()).max() < 1e-5


def test_a_checkpoint_with_another_alpha_keeps_its_effect(service: ServiceClient, server: Server) -> None:
    run = trained(service, server)
    path, reached = run.save_state().result().path, logprobs(run)

    again = service.create_training_client_from_state_with_optimizer(path)
    assert again.get_info().lora_alpha == ALPHA
    assert logprobs(again) == reached
    usual = service.create_lora_training_client(server.base_model, rank=4)
    usual.load_state(path).result()
    assert np.abs(np.subtract(logprobs(usual), reached)).max() < 1e-5
    with pytest.raises(RequestFailed, match=r"has alpha 7.5, the run 32: load it without"):
        usual.load_state_with_optimizer(path).result()


def test_runs_with_many_alphas_train_as_alone_bit_for_bit(service: ServiceClient, server: Server) -> None:
    alphas = [1.0, ALPHA, 32.0, 200.0]
    alone = [logprobs(trained(service, server, alpha)) for alpha in alphas]
    assert len({tuple(rows[0]) for rows in alone}) == len(alphas)
    with ThreadPoolExecutor(len(alphas)) as pool:
        crowd = list(pool.map(lambda alpha: logprobs(trained(service, server, alpha)), alphas))
    assert crowd == alone


# ---- Custom losses -------------------------------------------------------------------------------


def of_seed(length: int) -> Datum:
    """Make the datum of this length that the official SDK's scenario makes."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, VOCAB, (length + 1,), generator=generator)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": torch.ones(length)},
    )


def their_loss(_: list[Datum], rows: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return -torch.stack([row.sum() for row in rows]).sum(), {"rows": float(len(rows))}


def test_a_custom_loss_gives_the_same_bits_as_with_the_official_sdk(
    service: ServiceClient, server: Server, report: Report
) -> None:
    theirs = report.facts["custom"]
    data = tuple(of_seed(length) for length in (5, 9, 13, 8))
    run = service.create_lora_training_client(server.base_model, rank=4, seed=7)
    custom = run.forward_backward_custom(data, their_loss)
    run.optim_step(STEP)

    assert logprobs(run, data) == theirs["custom"]
    ours, told = custom.result().metrics, theirs["metrics"]
    if "surrogate_loss:sum" in told:
        assert ours == {**told, "clock_cycle:unique": ours["clock_cycle:unique"]}
    else:  # an older SDK reports only the surrogate
        assert (ours["surrogate_loss:sum"], ours["rows"]) == (told["loss:sum"], told["rows"])


def test_a_custom_loss_runs_on_the_server_in_one_pass(service: ServiceClient, server: Server) -> None:
    """Compare it to the bit with the same loss computed here, and read the errors of its requests."""

    def clipped(logprobs: Any, weights: Any) -> tuple[Any, dict[str, Any]]:
        ratio = torch.exp(logprobs + 6)
        return -torch.minimum(ratio * weights, ratio.clamp(0.8, 1.2)).sum(), {"custom/r:mean": ratio.mean()}

    def here(data: list[Datum], rows: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
        weights = [each.loss_fn_inputs["weights"].to_torch() for each in data]
        losses = [clipped(*each)[0] for each in zip(rows, weights, strict=True)]
        return torch.stack(losses).sum(), {}

    handle = service.create_custom_loss(clipped, {"logprobs": 1, "weights": 1})
    data = (of_seed(5), of_seed(9))
    run, twin = (service.create_lora_training_client(server.base_model, rank=4, seed=7) for _ in range(2))
    there = run.forward_backward_custom(data, handle).result()
    twin.forward_backward_custom(data, here)
    run.optim_step(STEP)
    twin.optim_step(STEP)
    assert logprobs(run, data) == logprobs(twin, data)
    assert there.metrics["custom/r:mean"] > 0

    bare = Datum(model_input=ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": [2]})
    with pytest.raises(RequestFailed, match=r"weights is missing; the custom loss reads it"):
        run.forward_backward_custom([bare], handle).result()
    with pytest.raises(RequestFailed, match=r"loss_id is not an id that create_custom_loss"):
        run.forward(data, "custom", {"loss_id": "loss-1"}).result()
    nan = service.create_custom_loss(lambda logprobs: (logprobs.sqrt().sum(), {}), {"logprobs": 1})
    with pytest.raises(RequestFailed, match=r"The loss of data\[0\] is nan"):
        run.forward_backward_custom(data, nan).result()


def test_a_run_with_muon_continues_from_its_checkpoint(service: ServiceClient, server: Server) -> None:
    run = service.create_lora_training_client(server.base_model, rank=4, seed=7, optimizer=types.MuonOptimizerConfig())
    assert run.get_info().optimizer_config.type == "muon"
    data, muon = (of_seed(9),), types.MuonParams(learning_rate=RATE)
    run.forward_backward(data, "cross_entropy")
    run.optim_step(muon)
    path = run.save_state("after-one").result().path
    twin = service.create_training_client_from_state_with_optimizer(path)
    assert twin.get_info().optimizer_config.type == "muon"
    for each in (run, twin):
        each.forward_backward(data, "cross_entropy")
        each.optim_step(muon).result()
    assert logprobs(run, data) == logprobs(twin, data)

    with pytest.raises(RequestFailed, match="created with optimizer muon, not adamw"):
        run.optim_step(STEP).result()
    plain = service.create_training_client_from_state(path)
    assert plain.get_info().optimizer_config.type == "adamw"
    with pytest.raises(RequestFailed, match="has an optimizer state of muon, the run has adamw"):
        plain.load_state_with_optimizer(path).result()


def test_a_preference_is_learned_by_a_loss_over_pairs(service: ServiceClient, server: Server) -> None:
    """Train with a loss that no sum over tokens can express, with the optimizer step sent before
    the loss is computed."""
    run = service.create_lora_training_client(server.base_model, rank=4, seed=3)
    pair = [of_seed(6), of_seed(7)]

    def preference(_: list[Datum], rows: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
        margin = rows[0].sum() - rows[1].sum()
        return -torch.nn.functional.logsigmoid(0.1 * margin), {"margin": margin}

    steps = []
    for _ in range(4):
        steps.append(run.forward_backward_custom(pair, preference))
        run.optim_step(STEP)
    margins = [step.result().metrics["margin"] for step in steps]
    assert margins == sorted(margins)
    assert steps[-1].result().loss < steps[0].result().loss


def test_a_failing_custom_loss_keeps_the_gradient_and_the_run(service: ServiceClient, server: Server) -> None:
    def broken(data: list[Datum], rows: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
        raise ZeroDivisionError("mine")

    run, twin = (service.create_lora_training_client(server.base_model, rank=4, seed=5) for _ in range(2))
    for each in (run, twin):
        each.forward_backward([DATUM], "cross_entropy")
    failed = run.forward_backward_custom([DATUM], broken)
    for each in (run, twin):
        each.optim_step(STEP)
    with pytest.raises(ZeroDivisionError, match="mine"):
        failed.result()
    assert logprobs(run) == logprobs(twin)


def test_a_custom_loss_keeps_its_position_in_a_full_queue(narrow_server: Server) -> None:
    """Fill the queue with requests that wait for the backward pass, which must still be accepted."""
    is_full = threading.Event()

    def patient(_: list[Datum], rows: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
        assert is_full.wait(300)
        return their_loss(_, rows)

    with ServiceClient(narrow_server.address, KEYS[0]) as service:
        run = service.create_lora_training_client(narrow_server.base_model, rank=2)
        custom = run.forward_backward_custom([DATUM], patient)
        steps = [run.optim_step(AdamParams(learning_rate=0.0)) for _ in range(24)]
        # As many as the queue holds, in any order: of requests sent at once, a later one may be
        # accepted first.
        asyncio.run(until(lambda: sum(step._accepted.done() for step in steps) >= 16))
        is_full.set()
        assert custom.result(300).metrics["rows"] == 1.0
        assert steps[-1].result(300).metrics is not None


# ---- One call for a step -------------------------------------------------------------------------


def test_train_equals_both_calls_bit_for_bit(service: ServiceClient, server: Server) -> None:
    by_hand, in_one = (service.create_lora_training_client(server.base_model, rank=4, seed=9) for _ in range(2))
    loss = by_hand.forward_backward([DATUM], "cross_entropy")
    by_hand.optim_step(STEP)
    output = in_one.train([DATUM], "cross_entropy", learning_rate=RATE).result()

    passed = loss.result()
    assert output.loss == passed.loss == passed.metrics["loss:sum"] / 24
    assert output.optim_step.metrics is not None
    assert output.metrics["grad_norm"] == output.optim_step.metrics["grad_norm"]
    assert logprobs(in_one) == logprobs(by_hand)


# ---- MinT ----------------------------------------------------------------------------------------


def test_reverse_kl_is_zero_to_oneself_and_falls_to_a_teacher(service: ServiceClient, server: Server) -> None:
    teacher = trained(service, server, alpha=32.0)
    path = for_sampler(teacher)
    data = [
        types.ReverseKlDatum(
            student_input=ModelInput.from_ints(TOKENS[:4]),
            reference_input=ModelInput.from_ints(TOKENS[:4]),
            target_tokens=TOKENS[4:12],
            weights=[1.0] * 8,
        )
    ]
    student = service.create_lora_training_client(server.base_model, rank=4, seed=2)
    itself = student.forward_backward_reverse_kl(server.base_model, data).result()
    student.optim_step(AdamParams(learning_rate=0.0)).result()

    kls = []
    for _ in range(5):
        kls.append(student.forward_backward_reverse_kl(path, data))
        student.optim_step(STEP)
    means = [kl.result().metrics["reverse_kl:mean"] for kl in kls]
    assert abs(itself.loss) < 1e-6
    assert means[-1] < 0.5 * means[0]
    token_losses = kls[0].result().outputs[0].token_losses
    assert token_losses is not None
    assert sum(token_losses.tolist()) == pytest.approx(kls[0].result().loss, rel=1e-5)


def test_an_interpolation_of_one_checkpoint_samples_the_same(service: ServiceClient, server: Server) -> None:
    run = trained(service, server)
    path = for_sampler(run)

    async def mixed() -> str:
        future = await mintx.interpolate_checkpoints_async(
            service, source_paths=[path], coefficients=[1.0], output_path="mix"
        )
        return (await future).path

    def tokens(path: str) -> list[int]:
        sampler = service.create_sampling_client(path)
        params = SamplingParams(max_tokens=8, seed=3)
        return sampler.sample(ModelInput.from_ints(TOKENS[:5]), 1, params).result().sequences[0].tokens

    made = asyncio.run(mixed())
    assert made.endswith("/sampler_weights/mix")
    assert tokens(made) == tokens(path)
    halves = service.interpolate_checkpoints([path, path], [0.5, 0.5], "halves").result()
    rest = service.create_rest_client()
    info = rest.get_weights_info_by_tinker_path(halves.path).result()
    assert (info.lora_rank, info.lora_alpha) == (8, ALPHA)


def test_a_gradient_too_large_for_adam_fails_its_step_only(
    service: ServiceClient, server: Server, tmp_path: Path
) -> None:
    run = service.create_lora_training_client(server.base_model, rank=4, seed=1)
    inputs = {"target_tokens": TOKENS[1:], "logprobs": [-60.0] * 24, "advantages": [-1.0] * 24}
    bad = Datum(model_input=ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)
    run.forward_backward([bad], "ppo").result()

    with pytest.raises(RequestFailed, match=r"too large for Adam.*data\[0\].loss_fn_inputs") as failed:
        run.optim_step(STEP).result()

    assert failed.value.category == "user"
    with pytest.raises(RequestFailed, match=r"learning_rate=1e\+30.*weights are as before"):
        run.train([DATUM], learning_rate=1e30).result()
    for _ in range(3):  # A receives its first gradient when B is no longer zero
        run.train([DATUM], learning_rate=RATE).result()
    folders = []
    for number in range(2):
        run.train([DATUM], learning_rate=RATE).result()
        path = run.save_state(f"after-{number}").result().path
        service.download_checkpoint(path, tmp_path / str(number))
        folders.append(tmp_path / str(number))
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    moved = [bool((first[name] != second[name]).any()) for name in first]
    assert all(moved)
