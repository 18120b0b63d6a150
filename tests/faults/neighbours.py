"""A tenant whose requests go wrong in every way that ends a careless server, between good ones."""

from __future__ import annotations

from typing import Any

from tests.faults.traffic import Call, Program

#: The place in its run of the request that its worker dies over; nobody else's run gets that far.
POISON_SEQ = 40
#: Kills the worker whenever it meets that request.
POISON = ",".join(f"{moment}~:train:0:{POISON_SEQ}=kill@*" for moment in ("worker.before_run", "worker.before_risk"))


def bad_neighbour() -> Program:
    """Ask for a loss that is not finite, for a token that there is not, and for the worker's death."""
    asked = {
        3: _pass(weight=3e38),  # the sum of three is infinite in float32
        4: _step(),
        7: _pass(token=10_000_000),
        POISON_SEQ: _pass(),
    }
    calls = [asked.get(seq, _pass()) for seq in range(1, POISON_SEQ + 3)]
    return Program(rank=4, seed=1, parts=[calls], end=[_pass()], samples=0)


def _pass(*, weight: float = 1.0, token: int = 5) -> Call:
    datum: dict[str, Any] = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "loss_fn_inputs": {
            "target_tokens": {"dtype": "int64", "data": [2, 3, token]},
            "weights": {"dtype": "float32", "data": [weight] * 3},
        },
    }
    asked = {"data": [datum], "loss_fn": "cross_entropy"}
    return Call("forward_backward", {"forward_backward_input": asked})


def _step() -> Call:
    adam = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    return Call("optim_step", {"adam_params": adam})
