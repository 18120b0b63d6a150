"""Images of passes and sample requests: decoded once, before they are accepted, in a child process.

Decoding takes time and memory, and its input may be hostile. The child has limits on both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cotrain_server.errors import Invalid
from cotrain_store.bodies.images import BodyImage, ImageReader, ImageRules, UnusableImage
from cotrain_store.messages.runs import PoolRecord

if TYPE_CHECKING:
    from cotrain_store.bodies.sample_body import SampleBody


@dataclass(frozen=True)
class SentImage:
    """Image of a prompt before its tokens are counted."""

    at: int  # position in the text tokens of the prompt
    chunk: int  # number among the chunks
    data: bytes
    format: str
    expected_tokens: int | None


def image_reader(pool: PoolRecord, where: str) -> ImageReader:
    """Return a reader of images for a base model. Raises Invalid if it reads text only."""
    if not pool.images:
        raise Invalid(f"{where} has an image, but {pool.base_model} reads text only here. Send encoded_text.")
    return ImageReader(ImageRules(**pool.images))


def insert_images(body: SampleBody, sent: tuple[SentImage, ...], pool: PoolRecord) -> SampleBody:
    """Return a sample request with its images decoded, and placeholders for their tokens in its prompt.

    Raises:
        Invalid: an image is not usable, or this pool samples from text only.
    """
    reader = image_reader(pool, "prompt")
    if pool.sampler == "vllm":
        raise Invalid("prompt has an image, but samples come from a vLLM server here. Send encoded_text.")
    prompt: list[int] = []
    images: list[BodyImage] = []
    done = 0
    for each in sent:
        prompt += body.prompt[done : each.at]
        done = each.at
        try:
            grid = reader.read(each.data, each.format, each.expected_tokens)
        except UnusableImage as unusable:
            raise Invalid(f"prompt.chunks[{each.chunk}] {unusable}") from unusable
        image = BodyImage(len(prompt), *grid, each.data)
        images.append(image)
        prompt += [int(pool.images["token"])] * image.tokens
    return replace(body, prompt=(*prompt, *body.prompt[done:]), images=tuple(images))
