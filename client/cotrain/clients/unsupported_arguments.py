"""Arguments and methods of the hosted SDK that this client lacks, with the reason for each.

A program written for the hosted SDK gets that reason instead of a bare TypeError. An argument is
accepted if its value has no effect. Type checkers and `help()` do not show these arguments.
"""

from collections.abc import Callable, Generator
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, Self, TypeVar

from cotrain.errors import UnsupportedInput

P = ParamSpec("P")
T = TypeVar("T")

ARGUMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "default_headers_overrides": ((None,), "this client sends its own headers only"),
    "learning_rate": ((), "pass AdamParams(learning_rate=…)"),
    "lora_alpha": ((), "the argument is alpha"),
    "lora_rank": ((), "the argument is rank"),
    "lr": ((), "pass AdamParams(learning_rate=…)"),
    "kind": (("snapshot",), "a sampler is always a snapshot; create another one for newer weights"),
    "loss_type_input": ((None, "logprobs"), "a custom loss takes log-probs only"),
    "prompt_alt_tokens_k": ((None, 0), "this server computes no alternative tokens"),
    "record_stability_info": ((False,), "this server records no stability metrics"),
    "target_modules": ((), "train_attn, train_mlp and train_unembed choose the modules"),
    "retry_config": ((None,), "ServiceClient(policy=RetryPolicy(…)) sets the retries"),
}
"""For each name, the values without effect, and the reason why no others are supported."""

METHODS = {
    "get_console_url": "there is no console; use `cotrain top` and `cotrain runs`",
    "get_telemetry": "this client collects no telemetry",
    "holder": "use service.create_sampling_client(…)",
}
"""Methods of the hosted SDK, with the reason why they are missing."""

REMEDIES = {
    "generate": "create a sampler: run.save_weights_and_get_sampling_client().sample(…)",
    "sample": "create a sampler: run.save_weights_and_get_sampling_client().sample(…)",
    "save_pretrained": "save with run.save_state(name), then service.download_checkpoint(path, folder)",
    "step": "the methods are run.forward_backward(…) and run.optim_step(…), or run.train(…) for both",
    "zero_grad": "optim_step zeroes the gradient",
}
"""Names that programs for other libraries use, with the method to use here."""


def accepts_hosted(*names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator: the method accepts these ARGUMENTS by keyword, and ignores values without effect.

    Another value raises UnsupportedInput.
    """

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        method.__qualname__ = method.__qualname__.replace("._", ".", 1)  # for errors of arguments

        @wraps(method)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in names:
                if name in kwargs:
                    _check(name, kwargs.pop(name))
            return method(*args, **kwargs)

        checked.hosted_arguments = names  # type: ignore[attr-defined]  # for the test that compares
        return checked

    return decorate


class ExplainsAbsent:
    """Base of objects that report a missing attribute with the reason, or with the method to use."""

    if not TYPE_CHECKING:  # hidden from type checkers, so that they report unknown attributes

        def __getattr__(self, name: str) -> NoReturn:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            reason = METHODS.get(name) or REMEDIES.get(name)
            raise AttributeError(f"{message}: {reason}" if reason else message, name=name, obj=self)


class Ready(ExplainsAbsent):
    """Base of objects that programs for the hosted SDK treat as futures: a call of `result` or an await returns it."""

    def result(self, timeout: float | None = None) -> Self:
        """Return this object, which is complete."""
        return self

    def __await__(self) -> Generator[None, None, Self]:
        yield from ()
        return self


def _check(name: str, value: Any) -> None:
    taken, reason = ARGUMENTS[name]
    if value not in taken:
        raise UnsupportedInput(f"{name}={value!r}: {reason}")
