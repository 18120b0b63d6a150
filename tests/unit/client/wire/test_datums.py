from __future__ import annotations

import numpy as np
import pytest
import torch

from cotrain.errors import UnsupportedInput
from cotrain.wire.datums import Datum, ImageChunk, ModelInput, is_unshifted


def test_a_loss_input_may_be_a_list_an_array_or_a_tensor() -> None:
    datum = Datum(
        model_input=ModelInput.from_ints([1, 2]),
        loss_fn_inputs={"target_tokens": [2, 3], "weights": np.ones(2), "advantages": torch.zeros(2)},
    )
    assert {name: tensor.dtype for name, tensor in datum.loss_fn_inputs.items()} == {
        "target_tokens": "int64",
        "weights": "float32",
        "advantages": "float32",
    }


def test_a_list_of_whole_weights_is_float32() -> None:
    datum = Datum(model_input=ModelInput.from_ints([1]), loss_fn_inputs={"weights": [1]})
    assert datum.loss_fn_inputs["weights"].dtype == "float32"


def test_chunks_are_joined_in_order() -> None:
    chunks = [{"type": "encoded_text", "tokens": [1, 2]}, {"type": "encoded_text", "tokens": [3]}]
    joined = ModelInput.model_validate({"chunks": chunks})
    assert joined.to_ints() == [1, 2, 3]
    assert joined.length == 3


@pytest.mark.parametrize("kind", ["image", "image_asset_pointer", "dmel"])
def test_a_chunk_that_is_not_text_is_refused_and_not_dropped(kind: str) -> None:
    image = ModelInput.model_validate({"chunks": [{"type": kind, "data": "AAAA", "format": "png"}]})
    with pytest.raises(UnsupportedInput, match=kind):
        image.to_ints()
    with pytest.raises(UnsupportedInput, match="expected_tokens" if kind == "image" else kind):
        _ = image.length


def test_the_length_of_an_image_is_its_expected_tokens() -> None:
    image = ImageChunk(data=b"png", format="png", expected_tokens=7)
    both = ModelInput.from_ints([1, 2]).append(image)
    assert both.length == 9
    assert both.has_images
    written = both.model_dump_json()
    assert '"data":"cG5n"' in written
    assert ModelInput.model_validate_json(written) == both
    assert not is_unshifted(Datum(both, {"target_tokens": [1] * 9}))
    with pytest.raises(ValueError, match="data"):
        ImageChunk(data="not base64", format="png")


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, True, 1.5, "7", None])
def test_a_token_out_of_the_range_of_the_wire_is_refused(token: object) -> None:
    with pytest.raises(ValueError, match="tokens"):
        ModelInput.model_validate({"chunks": [{"type": "encoded_text", "tokens": [token]}]})
