"""Try one call and classify its outcome: supported, refused with a message, or failed."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import tinker

from tests.conformance.scoreboard.marks import ABSENT, FAILED, REFUSED, SUPPORTED
from tests.conformance.scoreboard.place import Place

PATIENCE_S = 60
# Exceptions of an SDK's own refusals; their subclasses are other errors.
OWN_REFUSALS = {tinker.TinkerError, NotImplementedError, RuntimeError, ValueError}
Outcome = tuple[str, str]
"""Outcome of a call, and the reason if it is not supported."""


@dataclass(frozen=True)
class Call:
    """A method of `on`, its real arguments, and the condition that its answer must satisfy."""

    on: Any
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    holds: Callable[[Any], bool] | None = None


Recipe: TypeAlias = "Callable[[Place], Call]"


def call(on: Any, *args: Any, **options: Any) -> Call:
    """Return a call with these arguments that accepts any answer."""
    return Call(on, args, options)


def check(holds: Callable[[Any], bool], on: Any, *args: Any, **options: Any) -> Call:
    """Return a call with these arguments, whose answer must satisfy `holds`."""
    return Call(on, args, options, holds)


class UnexpectedAnswer(Exception):
    """The call returned an unexpected value."""


class NotOffered(Exception):
    """This version's method does not accept this argument."""


def attempt(act: Callable[[], Any]) -> Outcome:
    """Act in a separate thread, for at most PATIENCE_S."""
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(_judged(act)), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return outcomes[0] if outcomes else (FAILED, f"No answer within {PATIENCE_S} s.")


def perform(call: Call, name: str, passed: set[str]) -> None:
    """Call the method, or read the property, and wait for the result of its promise.

    Adds the names of the passed parameters to `passed`, whatever the outcome.
    """
    if isinstance(inspect.getattr_static(type(call.on), name, None), property):
        answer = getattr(call.on, name)
    else:
        method = getattr(call.on, name)
        passed |= _bound(method, call)
        answer = settled(method(*call.args, **call.options))
    if call.holds is not None and not call.holds(answer):
        raise UnexpectedAnswer(f"Answered {answer!r:.200}")


def parameters(owner: Any, name: str) -> set[str]:
    """Return the parameters of a method, without `self`."""
    method = inspect.getattr_static(owner, name)
    if isinstance(method, property):
        return set()
    named = inspect.signature(getattr(owner, name)).parameters.values()
    return {
        each.name for each in named if each.name != "self" and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }


def _bound(method: Any, call: Call) -> set[str]:
    try:
        return set(inspect.signature(method).bind(*call.args, **call.options).arguments)
    except TypeError as error:
        raise NotOffered(*error.args) from error


def settled(answer: Any) -> Any:
    """Wait for coroutines and futures of any kind, also nested ones."""
    while True:
        if inspect.iscoroutine(answer):
            answer = asyncio.run(answer)
        elif callable(getattr(answer, "result", None)):
            answer = answer.result(PATIENCE_S)
        else:
            return answer


def _judged(act: Callable[[], Any]) -> Outcome:
    try:
        act()
    except Exception as error:  # noqa: BLE001 - any exception of an SDK is a result
        return judge(error)
    return (SUPPORTED, "")


def judge(error: Exception) -> Outcome:
    """Classify an error as a refusal or a failure, and extract its message."""
    if isinstance(error, NotOffered) or _is_of_another_version(error):
        return (ABSENT, "")
    if isinstance(error, tinker.APIStatusError) and not 500 <= error.status_code != 501:
        return (REFUSED, words(error))
    if isinstance(error, tinker.RequestFailedError) and error.category == "user":
        return (REFUSED, words(error))
    if type(error) in OWN_REFUSALS:
        return (REFUSED, f"The SDK itself: {words(error)}")
    return (FAILED, f"{type(error).__name__}: {words(error)}")


def _is_of_another_version(error: Exception) -> bool:
    """Return True if a recipe uses a type or a method that this version does not have."""
    return isinstance(error, AttributeError) and (
        error.obj is tinker.types or isinstance(error.obj, tinker.ServiceClient)
    )


def words(error: Exception) -> str:
    """Return the server's own message if there is one, else the exception's."""
    body = getattr(error, "body", None)
    detail = body.get("detail") if isinstance(body, dict) else None
    return str(detail or error)
