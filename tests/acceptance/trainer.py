"""One run of the official SDK in a process of its own, steered line by line over its stdin.

Usage: `python trainer.py URL API_KEY`. A line `begin N` sends both requests of step N and answers
`sent`; a line `finish` waits for the oldest step under way and answers `[loss, grad_norm]`.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from typing import Any

import tinker
from tinker import types

TIMEOUT_S = 180.0


def datum(index: int, length: int) -> types.Datum:
    """Make an example that depends on the step alone, so that every run is given the same data."""
    tokens = [(index * 31 + place * 17) % 500 for place in range(length + 1)]
    inputs = {
        "target_tokens": types.TensorData(data=tokens[1:], dtype="int64"),
        "weights": types.TensorData(data=[1.0] * length, dtype="float32"),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def main(url: str, api_key: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=api_key)
    run = service.create_lora_training_client(base_model="tiny", rank=8, seed=7).result(TIMEOUT_S)
    under_way: deque[tuple[Any, Any]] = deque()
    for line in sys.stdin:
        if line.startswith("begin"):
            batch = [datum(int(line.split()[1]), length) for length in (12, 40, 7)]
            passed = run.forward_backward(batch, "cross_entropy")
            under_way.append((passed, run.optim_step(types.AdamParams(learning_rate=1e-3))))
            print("sent", flush=True)
        else:
            passed, stepped = under_way.popleft()
            loss = passed.result(TIMEOUT_S).metrics["loss:sum"]
            grad_norm = stepped.result(TIMEOUT_S).metrics["grad_norm"]
            print(json.dumps([loss, grad_norm]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
