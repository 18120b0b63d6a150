"""Which methods and arguments of the hosted SDK our client has, and why not the others."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cotrain import SamplingClient, ServiceClient, TrainingClient

if TYPE_CHECKING:
    from collections.abc import Iterator

METHODS_LEFT_OUT = {
    "no telemetry is sent": {"get_telemetry"},
    "there is no console": {"get_console_url"},
    "custom losses run on the client": {"create_custom_loss"},
    "inner workings": {"holder", "create", "on_queue_state_change"},
    "a sampling client may be pickled": {"get_sampler_handle", "from_sampler_handle"},
    "of the RestClient here": {"copy_weights"},
}
ARGUMENTS_LEFT_OUT = {
    "the server says what is tried again": {"retry_config"},
    "no telemetry is sent": {"record_stability_info"},
    "a sampler is a snapshot, always": {"kind"},
    "the server computes no such thing": {"prompt_alt_tokens_k"},
    "AdamW is the only optimizer": {"optimizer", "optim_params"},
    "a custom loss is of log-probs": {"loss_type_input"},
    "a checkpoint knows its base model": {"base_model of create_training_client_from_state"},
    "one word, `outcome`": {"status", "detail"},
}


@pytest.mark.parametrize("ours", [ServiceClient, TrainingClient, SamplingClient])
def test_every_method_of_the_hosted_sdk_is_here_or_left_out_for_a_reason(ours: type) -> None:
    left_out = set(chain(*METHODS_LEFT_OUT.values()))
    assert {name for name in official_methods(ours) if not hasattr(ours, name)} <= left_out


@pytest.mark.parametrize("ours", [ServiceClient, TrainingClient, SamplingClient])
def test_every_argument_of_the_hosted_sdk_is_here_or_left_out_for_a_reason(ours: type) -> None:
    left_out = set(chain(*ARGUMENTS_LEFT_OUT.values()))
    missing = {
        f"{argument} of {name}"
        for name, arguments in official_methods(ours).items()
        for argument in arguments
        if hasattr(ours, name) and argument not in arguments_of(getattr(ours, name))
    }
    assert {
        each
        for each in missing
        if each not in left_out
        and each.removesuffix("_async") not in left_out
        and each.partition(" ")[0] not in left_out
    } == set()


@pytest.mark.parametrize("ours", [ServiceClient, TrainingClient, SamplingClient])
def test_both_forms_of_a_method_take_the_same(ours: type) -> None:
    for name, method in inspect.getmembers(ours, inspect.isfunction):
        if name.endswith("_async"):
            plain = getattr(ours, name.removesuffix("_async"))
            assert arguments_of(method) == arguments_of(plain), name


@pytest.mark.parametrize("ours", [ServiceClient, TrainingClient, SamplingClient])
def test_every_method_says_its_own_name_and_what_it_gives(ours: type) -> None:
    for name, method in inspect.getmembers(ours, inspect.isfunction):
        if not name.startswith("_"):
            assert (method.__name__, bool(method.__doc__)) == (name, True)
            given = str(inspect.signature(method).return_annotation)
            assert not (name.endswith("_async") and given.startswith("Future")), name


def arguments_of(method: Any) -> list[str]:
    return list(inspect.signature(method).parameters)


def official_methods(ours: type) -> dict[str, list[str]]:
    """Read, without importing it, which methods the hosted SDK's class of this name has."""
    methods = {
        each.name: [argument.arg for argument in (*each.args.args, *each.args.kwonlyargs)]
        for each in _body_of(ours.__name__)
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        if not each.name.startswith("_")
    }
    assert len(methods) > 10
    return methods


def _body_of(class_name: str) -> Iterator[ast.stmt]:
    spec = importlib.util.find_spec("tinker")
    assert spec is not None
    assert spec.origin is not None
    for file in Path(spec.origin).parent.glob("lib/public_interfaces/*_client.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                yield from node.body
