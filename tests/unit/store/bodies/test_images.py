"""Images as strangers send them: read with a number of tokens, or refused by a sentence."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import PIL.Image
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from cotrain_store.bodies import images
from cotrain_store.bodies.images import ImageReader, ImageRules, UnusableImage, grid_of
from tests.support.pictures import RULES, animation, picture, png_of_size, saved

PNG, JPEG = picture(0, 24, 16), picture(0, 24, 16, "JPEG")


def reader() -> ImageReader:
    return ImageReader(ImageRules(**RULES))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "1", "P", "I;16"])
def test_every_kind_of_png_is_read(mode: str) -> None:
    deep = saved(PIL.Image.fromarray(np.zeros((16, 24), np.uint16)), "PNG")
    data = deep if mode == "I;16" else picture(1, 24, 16, mode=mode)
    assert reader().read(data, "png", 6) == (2, 3)


@pytest.mark.parametrize("settings", [{}, {"progressive": True}, {"quality": 5}])
def test_every_kind_of_jpeg_is_read(settings: dict[str, Any]) -> None:
    assert reader().read(picture(1, 24, 16, "JPEG", **settings), "jpeg", None) == (2, 3)
    assert reader().read(picture(1, 24, 16, "JPEG", "CMYK"), "jpeg", None) == (2, 3)


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (b"", "png", "is neither a PNG nor a JPEG file."),
        (b"GIF89a" + bytes(50), "png", "is neither a PNG nor a JPEG file."),
        (picture(0, 16, 16, "GIF"), "png", "is neither a PNG nor a JPEG file."),
        (picture(0, 16, 16, "WEBP"), "jpeg", "is neither a PNG nor a JPEG file."),
        (b"<svg/>", "png", "is neither a PNG nor a JPEG file."),
        (PNG[:20], "png", "is neither a PNG nor a JPEG file."),
        (PNG, "jpeg", "is a PNG file with format='jpeg'."),
        (JPEG, "png", "is a JPEG file with format='png'."),
        (PNG, "gif", "has format 'gif'; send png or jpeg."),
        (PNG[:-40], "png", "cannot be decoded: "),
        (JPEG[:-200], "jpeg", "cannot be decoded: "),
        (PNG[:60] + bytes(30) + PNG[90:], "png", "cannot be decoded: "),
        (animation(), "png", "is an animation. Send its frames as images."),
        (png_of_size(50_000, 50_000), "png", "has more pixels than the limit of 16777216."),
        (png_of_size(2**31 - 1, 2**31 - 1), "png", "has more pixels than the limit of 16777216."),
        (png_of_size(8192, 2049), "png", "has 8192 x 2049 pixels; the limit is 16777216. Reduce it."),
        (png_of_size(402, 2), "png", "has 402 x 2 pixels; one side may be 200 times the other."),
        (JPEG + b"\xff\xda" * 60, "jpeg", "has more than 50 scans. Save it as a baseline JPEG."),
    ],
)
def test_a_hostile_image_is_refused(data: bytes, kind: str, message: str) -> None:
    with pytest.raises(UnusableImage) as refused:
        reader().read(data, kind, None)
    assert str(refused.value).startswith(message)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)


@pytest.mark.parametrize("cut", range(0, len(PNG), 97))
def test_a_cut_image_is_refused_at_any_place(cut: int) -> None:
    for data, kind in ((PNG[:cut], "png"), (JPEG[: cut * len(JPEG) // len(PNG)], "jpeg")):
        with pytest.raises(UnusableImage):
            reader().read(data, kind, None)


def test_the_images_of_a_request_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_REQUEST_PIXELS", 3 * 24 * 16)
    one = reader()
    for _ in range(3):
        one.read(PNG, "png", 6)
    with pytest.raises(UnusableImage, match="is beyond the limit of 1152 pixels for all images"):
        one.read(PNG, "png", 6)
    monkeypatch.setattr(images, "MAX_IMAGES", 4)
    with pytest.raises(UnusableImage, match="is image 5 of the request, which may have 4"):
        one.read(PNG, "png", 6)


@pytest.mark.parametrize(("least_pixels", "most_pixels"), [(256, 4096), (56 * 56, 28 * 28 * 1280)])
def test_tokens_are_counted_as_by_transformers(least_pixels: int, most_pixels: int) -> None:
    rules = ImageRules(8, least_pixels, most_pixels, 3)
    rng = np.random.default_rng(0)
    sizes = [(1, 1), (4096, 4096), (4, 12), (12, 4), *rng.integers(1, 300, (200, 2)).tolist()]
    for width, height in sizes:
        if max(width, height) <= 200 * min(width, height):
            theirs = smart_resize(height, width, 8, least_pixels, most_pixels)
            assert grid_of(width, height, rules) == (theirs[0] // 8, theirs[1] // 8)
