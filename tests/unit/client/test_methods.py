"""Methods and arguments of the hosted SDK: each works here under the same name, or raises the reason."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import cotrain
from cotrain import Future, RestClient, SamplingClient, ServiceClient, TrainingClient
from cotrain.clients.unsupported_arguments import ARGUMENTS, METHODS

Function = ast.FunctionDef | ast.AsyncFunctionDef

CLIENTS = {
    ServiceClient: "ServiceClient",
    TrainingClient: "TrainingClient",
    SamplingClient: "SamplingClient",
    RestClient: "RestClient",
}
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
        for each in _body_of(CLIENTS[ours])
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
