"""Recipes of all methods: real arguments, and a condition on the answer.

A method without a recipe is reported as "not tried", and an argument that no recipe passes is
listed on the page. The twin `x_async` is called like `x`, so one recipe serves both. A recipe of an
option of a method is named `method(option)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.conformance.scoreboard.calls import Recipe, call
from tests.conformance.scoreboard.place import Place
from tests.conformance.scoreboard.rest_recipes import REST, billing
from tests.conformance.scoreboard.sampling_recipes import sampling
from tests.conformance.scoreboard.service_recipes import AUTH, SERVICE
from tests.conformance.scoreboard.training_recipes import CROSS_ENTROPY, training


def future(future_of: Callable[[Place], Any]) -> Mapping[str, Recipe]:
    """Return the recipes of a promise."""
    return {
        "coroutine": lambda at: call(future_of(at)),
        "future": lambda at: call(future_of(at)),
        "result": lambda at: call(future_of(at), timeout=60.0),
    }


RECIPES: Mapping[str, Mapping[str, Recipe]] = {
    "APIFuture": future(lambda at: at.run.forward(at.data, CROSS_ENTROPY)),
    "AdminClient": billing(lambda at: at.admin),
    "BackcompatSamplingClientFuture": {
        **sampling(lambda at: at.pending_sampler()),
        **future(lambda at: at.pending_sampler()),
    },
    "BackcompatTrainingClientFuture": {**training(lambda at: at.pending_run()), **future(lambda at: at.pending_run())},
    "LossHandle": {"input_names": lambda at: call(at.loss_handle), "key": lambda at: call(at.loss_handle)},
    "RestClient": REST,
    "SamplingClient": sampling(lambda at: at.sampler),
    "ServiceClient": SERVICE,
    "TrainingClient": training(lambda at: at.run),
    "auth": AUTH,
}
