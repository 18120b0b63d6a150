"""Reverse-KL requests in the format of `mint`."""

from __future__ import annotations

from typing import Any


def kl_datum_body(**changes: Any) -> dict[str, Any]:
    """Make a valid datum."""
    whole = {
        "student_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "reference_input": {"chunks": [{"type": "encoded_text", "tokens": [4, 5]}]},
        "target_tokens": {"data": [7, 8], "shape": [2], "dtype": "int64"},
        "weights": {"data": [1.0, 1.0], "shape": [2], "dtype": "float32"},
    }
    return {**whole, **changes}


def kl_body(run: str, **changes: Any) -> dict[str, Any]:
    """Make a valid request."""
    whole = {
        "model_id": run,
        "reference_model_path": "tiny/model",
        "data": [kl_datum_body()],
        "temperature": 1.0,
        "seq_id": None,
        "type": "mint_forward_backward_reverse_kl",
    }
    return {**whole, **changes}
