"""Calls of programs for the hosted SDK: each works, or raises one sentence with the reason."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import cotrain
from cotrain import (
    AdamParams,
    Datum,
    Future,
    ModelInput,
    RestClient,
    SamplingClient,
    ServiceClient,
    TrainingClient,
    UnsupportedInput,
    types,
)
from cotrain.clients.unsupported_arguments import ARGUMENTS, METHODS
from tests.support.fake_sampling import FakeSampling

PROMPT = ModelInput.from_ints([7, 8, 9])


@pytest.fixture
def api() -> FakeSampling:
    return FakeSampling()


def test_a_client_can_be_used_as_its_own_future(service: ServiceClient) -> None:
    run = service.create_lora_training_client("m").result(timeout=1)
    sampler = service.create_sampling_client(base_model="m").result()

    async def awaited() -> tuple[object, object]:
        return await run, await sampler

    assert asyncio.run(awaited()) == (run, sampler)


def test_a_step_accepts_its_parameters_under_either_name(api: FakeSampling, service: ServiceClient) -> None:
    run = service.create_lora_training_client("m")
    run.optim_step(optim_params=AdamParams(learning_rate=0.5)).result()
    run.optim_step_async(adam_params=AdamParams(learning_rate=0.25)).result()
    sent = [body["adam_params"]["learning_rate"] for body in api.bodies("optim_step")]
    assert sent == [0.5, 0.25]
    with pytest.raises(UnsupportedInput, match="give one of them"):
        run.optim_step(AdamParams(), optim_params=AdamParams())


def test_an_argument_without_effect_is_accepted(service: ServiceClient) -> None:
    unnamed: Any = service  # type checkers know none of these
    run = unnamed.create_lora_training_client("m", optimizer=types.AdamOptimizerConfig())
    sampler = unnamed.create_sampling_client(base_model="m", retry_config=None, record_stability_info=False)
    assert len(sampler.sample(PROMPT, 2, prompt_alt_tokens_k=0).result().sequences) == 2
    assert run.model_id == "s1:train:0"


@pytest.mark.parametrize(
    ("call", "argument", "message"),
    [
        ("create_lora_training_client", {"optimizer": "dimuon"}, "must be types.AdamOptimizerConfig"),
        ("create_sampling_client", {"retry_config": object()}, r"ServiceClient\(policy="),
        ("create_sampling_client_async", {"record_stability_info": True}, "records no stability metrics"),
    ],
)
def test_an_unsupported_argument_raises_with_the_reason(
    service: ServiceClient, call: str, argument: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedInput, match=message):
        asyncio.run(_awaited(getattr(service, call)("m", **argument)))


def test_a_refused_sampler_takes_no_number(api: FakeSampling, service: ServiceClient) -> None:
    run: Any = service.create_lora_training_client("m")
    with pytest.raises(UnsupportedInput, match="a sampler is always a snapshot"):
        run.save_weights_and_get_sampling_client(kind="inflight")
    run.save_weights_and_get_sampling_client(kind="snapshot")
    assert [body["seq_id"] for body in api.bodies("save_weights_for_sampler")] == [1]


def test_a_mistyped_argument_is_an_error(service: ServiceClient) -> None:
    with pytest.raises(TypeError, match="optimiser"):
        service.create_lora_training_client("m", optimiser=None)  # type: ignore[call-arg]


def test_a_missing_method_raises_with_the_reason(service: ServiceClient) -> None:
    clients: list[Any] = [service, service.create_lora_training_client("m")]
    for client in (*clients, service.create_sampling_client(base_model="m")):
        with pytest.raises(AttributeError, match="collects no telemetry"):
            client.get_telemetry()
        with pytest.raises(AttributeError, match=r"has no attribute 'traing'$"):
            client.traing()


def test_closing_returns_a_future_and_sends_the_detail(api: FakeSampling, service: ServiceClient) -> None:
    service.create_lora_training_client("m")
    assert service.close("interrupted", detail="lunch").result() is None
    assert api.bodies("sessions/s1/finish") == [{"reason": {"type": "interrupted"}, "detail": "lunch"}]


def test_a_handle_identifies_a_sampler_and_contains_no_key(
    service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = service.create_sampling_client(base_model="m")
    handle = sampler.get_sampler_handle()
    asked: list[str] = []

    def share(settings: Any) -> Any:
        asked.append(settings.api_key)
        return sampler._connection

    monkeypatch.setattr("cotrain.clients.sampling.shared_connection", share)
    other = SamplingClient.from_sampler_handle(handle, api_key="tml-other")
    assert (other.sampler_id, other.get_base_model()) == (sampler.sampler_id, "m")
    assert len(other.sample(PROMPT, 1).result().sequences) == 1
    assert asked == ["tml-other"]
    assert "tml-key" not in handle


@pytest.mark.parametrize("text", ["", "nothing", "bm9uZQ==", "{}"])
def test_an_invalid_handle_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no handle of a sampler"):
        SamplingClient.from_sampler_handle(text, api_key="tml-key")


#: Usual mistakes, and a part of the answer with the remedy.
MISTAKES: list[tuple[Callable[[Any, Any, Any], Any], str]] = [
    (lambda service, run, sampler: run.optim_step(1e-4), r"must be AdamParams\(learning_rate"),
    (lambda service, run, sampler: run.optim_step(lr=1e-4), r"pass AdamParams\(learning_rate"),
    (lambda service, run, sampler: run.sample(PROMPT), "save_weights_and_get_sampling_client"),
    (lambda service, run, sampler: sampler.sample([PROMPT, PROMPT]), "one call per prompt"),
    (lambda service, run, sampler: service.create_lora_training_client("m", lora_alpha=8), "the argument is alpha"),
    (
        lambda service, run, sampler: service.create_lora_training_client("m", target_modules=[]),
        "train_attn, train_mlp and train_unembed",
    ),
    (
        lambda service, run, sampler: service.create_lora_training_client("m", bias="none"),
        r"ServiceClient\.create_lora_training_client\(\) got an unexpected",
    ),
    (lambda service, run, sampler: RESULT["loss"], r"use \.loss, \.metrics"),
    (lambda service, run, sampler: RESULT.metrics["loss"], r"loss:sum; the mean loss is"),
]
RESULT: Any = types.ForwardBackwardOutput(loss_fn_output_type="x", loss_fn_outputs=[], metrics={"loss:sum": 2.0})


@pytest.mark.parametrize(("mistake", "remedy"), MISTAKES)
def test_a_usual_mistake_is_answered_with_its_remedy(
    service: ServiceClient, mistake: Callable[[Any, Any, Any], Any], remedy: str
) -> None:
    run, sampler = service.create_lora_training_client("m"), service.create_sampling_client("m")
    with pytest.raises((UnsupportedInput, AttributeError, TypeError, KeyError), match=remedy):
        mistake(service, run, sampler)


def test_targets_that_equal_the_input_are_reported_once(
    service: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    run = service.create_lora_training_client("m")
    for tokens, targets in (([1, 2, 3], [2, 3, 4]), ([7, 7], [7, 7]), ([1, 2], [1, 2]), ([3, 4], [3, 4])):
        inputs = {"target_tokens": targets, "weights": [1.0] * len(targets)}
        run.forward_backward([Datum(ModelInput.from_ints(tokens), inputs)], "cross_entropy")
        assert ("not shifted?" in caplog.text) is (tokens == targets and tokens != [7, 7])
    assert caplog.text.count("not shifted?") == 1


async def _awaited(value: Any) -> None:
    await value


Function = ast.FunctionDef | ast.AsyncFunctionDef

CLIENTS = (ServiceClient, TrainingClient, SamplingClient, RestClient)
METHODS_LEFT_OUT = {
    "it takes an inner part of that SDK": {"create"},
    "there is nothing to log: the server says why it waits": {"on_queue_state_change"},
    "taken in a sentence": set(METHODS),
}
NAMES_LEFT_OUT = {
    "a client is the client itself here": {"BackcompatSamplingClientFuture", "BackcompatTrainingClientFuture"},
    "a loss of one's own is a plain function": {"LossHandle", "PerDatumLossFn"},
    "AdamW is the only optimizer": {"DimuonOptimizerConfig", "DimuonParams"},
    "the server computes no such thing": {"PromptProvenanceSpan", "SampledProvenanceSpan"},
    "inner workings": {"ExperimentalWarning", "RequestOptions", "Timeout", "auth"},
    "the name of that package": {"__title__"},
}
OTHER_ORDER = {"ServiceClient.__init__"}  # the server and the key come first here
NO_DEFAULT = {"destination_project_id"}  # no variable names a project here


@pytest.mark.parametrize("ours", CLIENTS)
def test_every_method_of_the_hosted_sdk_exists_or_is_left_out_for_a_reason(ours: type) -> None:
    missing = {name for name in official_methods(ours) if not hasattr(ours, name)}
    assert missing <= set(chain(*METHODS_LEFT_OUT.values()))


def test_every_left_out_method_is_still_missing() -> None:
    official = set(chain(*map(official_methods, CLIENTS)))
    assert set(chain(*METHODS_LEFT_OUT.values())) <= official
    assert not any(hasattr(ours, name) for ours in CLIENTS for name in METHODS)


@pytest.mark.parametrize("ours", CLIENTS)
def test_every_argument_of_the_hosted_sdk_is_accepted_by_its_name(ours: type) -> None:
    for name, method in official_methods(ours).items():
        if hasattr(ours, name):
            mine = getattr(ours, name)
            taken = {*arguments_of(mine), *getattr(mine, "hosted_arguments", ())}
            assert set(all_arguments(method)) - taken == set(), name


@pytest.mark.parametrize("ours", CLIENTS)
def test_positional_arguments_have_the_same_meaning(ours: type) -> None:
    for name, method in official_methods(ours).items():
        if not hasattr(ours, name) or f"{ours.__name__}.{name}" in OTHER_ORDER:
            continue
        mine = getattr(ours, name)
        without_gaps = [
            each for each in positional_arguments(method) if each not in getattr(mine, "hosted_arguments", ())
        ]
        for theirs, here in zip(without_gaps, positional_of(mine), strict=False):
            assert theirs == here or {theirs, here} == {"optim_params", "adam_params"}, name


@pytest.mark.parametrize("ours", CLIENTS)
def test_defaults_equal_those_of_the_hosted_sdk(ours: type) -> None:
    for name, method in official_methods(ours).items():
        if not hasattr(ours, name):
            continue
        mine = inspect.signature(getattr(ours, name)).parameters
        for argument, default in defaults_of(method).items():
            if argument in mine and argument not in NO_DEFAULT:
                assert mine[argument].default == default, f"{name}({argument})"


def returned(method: Any) -> str:
    """Return the type that a method returns, as in its source, without its module."""
    given = str(inspect.signature(method)).rpartition("-> ")[2]
    return re.sub(r"\w+\.", "", given).strip("'")


@pytest.mark.parametrize("ours", CLIENTS)
def test_methods_that_return_a_future_there_return_one_here(ours: type) -> None:
    for name, method in official_methods(ours).items():
        if hasattr(ours, name) and "Future" in ast.unparse(method.returns or ast.Constant("")):
            kind = returned(getattr(ours, name)).partition("[")[0]
            assert kind in ("Future", "LossHandle", "Submitted", "SamplingClient", "TrainingClient"), name


def test_every_hosted_name_exists_or_is_left_out_for_a_reason() -> None:
    missing = {name for name in official_names() if not hasattr(cotrain, name)}
    assert missing == set(chain(*NAMES_LEFT_OUT.values()))


def test_every_future_has_the_methods_of_the_hosted_ones() -> None:
    assert all(hasattr(Future, name) for name in ("result", "result_async", "__await__"))


@pytest.mark.parametrize("ours", [ServiceClient, TrainingClient, SamplingClient])
def test_both_forms_of_a_method_have_the_same_arguments(ours: type) -> None:
    for name, method in inspect.getmembers(ours, inspect.isfunction):
        if name.endswith("_async"):
            plain = getattr(ours, name.removesuffix("_async"))
            assert arguments_of(method) == arguments_of(plain), name


@pytest.mark.parametrize("ours", [ServiceClient, TrainingClient, SamplingClient])
def test_every_method_has_its_own_name_and_a_docstring(ours: type) -> None:
    for name, method in inspect.getmembers(ours, inspect.isfunction):
        if not name.startswith("_"):
            assert (method.__name__, bool(method.__doc__)) == (name, True)
            given = returned(method)
            assert not (name.endswith("_async") and given.startswith("Future")), name


def test_every_unsupported_argument_belongs_to_a_method() -> None:
    methods = chain(*(inspect.getmembers(ours, inspect.isfunction) for ours in CLIENTS))
    taken = {name for _, method in methods for name in getattr(method, "hosted_arguments", ())}
    assert taken == set(ARGUMENTS)


def arguments_of(method: Any) -> list[str]:
    return list(inspect.signature(method).parameters)


def positional_of(method: Any) -> list[str]:
    parameters = inspect.signature(method).parameters.values()
    return [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]


def all_arguments(method: Function) -> list[str]:
    return [argument.arg for argument in (*method.args.args, *method.args.kwonlyargs)]


def positional_arguments(method: Function) -> list[str]:
    return [argument.arg for argument in method.args.args]


def defaults_of(method: Function) -> dict[str, Any]:
    """Return the defaults of the optional arguments."""
    positional = reversed(positional_arguments(method))
    given = zip(positional, reversed(method.args.defaults), strict=False)
    named = zip((each.arg for each in method.args.kwonlyargs), method.args.kw_defaults, strict=True)
    return {name: ast.literal_eval(value) for name, value in chain(given, named) if value}


@cache
def official_methods(ours: type) -> dict[str, Function]:
    """Return the methods of the hosted SDK's class of this name, without importing it."""
    methods = {
        each.name: each
        for each in _body_of(ours.__name__)
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        if not each.name.startswith("_") or (each.name == "__init__" and ours is ServiceClient)
    }
    assert len(methods) > 10
    return methods


def official_names() -> set[str]:
    body = ast.parse(_package().joinpath("__init__.py").read_text()).body
    exported = next(node for node in body if isinstance(node, ast.Assign) and _is_all(node))
    return set(ast.literal_eval(exported.value))


def _is_all(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)


def _body_of(class_name: str) -> Iterator[ast.stmt]:
    for file in _package().glob("lib/public_interfaces/*_client.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                yield from node.body


def _package() -> Path:
    spec = importlib.util.find_spec("tinker")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
