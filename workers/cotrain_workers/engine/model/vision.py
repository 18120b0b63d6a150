"""Vision tower of a base model: from the bytes of an image to rows of the decoder's input.

The tower is frozen and computes one image at a time, so the bits of an image depend on no other one. Its
results are cached by tenant and digest. No tenant finds another one's image in the cache.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import PIL
import PIL.Image
import torch
from torch import nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.model.model_source import NoModel
from cotrain_workers.engine.ops import Image
from cotrain_workers.engine.routing import ImageRows, Router

#: Pixels of an image as sent. The API refuses larger ones before they are accepted.
MAX_PIXELS = 1 << 24
#: Host memory for the results of the tower.
CACHE_BYTES = 1 << 28
DECODER = f"pillow {PIL.__version__}"
#: Settings of the only processor that is implemented here: the type of all models in `families.py` that read images.
PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")


class ImageUnusable(Exception):
    """An image cannot be computed; the message is for the tenant."""


@dataclass(frozen=True)
class ImageFacts:
    """Facts by which the tokens of an image are counted from its size in pixels."""

    side: int  # pixels of a token's side
    least_pixels: int  # smaller images are enlarged to these
    most_pixels: int
    token: int  # id of the placeholder of each token


def read_processor(model: str, *, local_files_only: bool) -> Any | None:
    """Return the preprocessing of a model's images; None if its files do not describe it.

    Raises NoModel if they describe another kind.
    """
    try:
        settings, _ = Qwen2VLImageProcessorPil.get_image_processor_dict(model, local_files_only=local_files_only)
    except OSError:
        return None
    kind = settings.get("image_processor_type")
    if kind not in PROCESSORS:
        raise NoModel(
            f"its preprocessor_config.json is for {kind}; {', '.join(PROCESSORS[:2])} can be read. "
            "Remove the file to serve the model for text alone."
        )
    return Qwen2VLImageProcessorPil.from_dict(settings)


class FeatureCache:
    """Results of the tower by tenant and digest, up to a number of bytes.

    The tenant that holds most loses its oldest result first, so a tenant with few images keeps them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_tenant: dict[str, OrderedDict[bytes, torch.Tensor]] = {}
        self._bytes: Counter[str] = Counter()

    def get(self, tenant: str, digest: bytes) -> torch.Tensor | None:
        """Return a result and mark it as used, or return None."""
        own = self._by_tenant.get(tenant, OrderedDict())
        if digest in own:
            own.move_to_end(digest)
        return own.get(digest)

    def put(self, tenant: str, digest: bytes, features: torch.Tensor) -> None:
        """Keep a result, unless it is larger than the cache."""
        if features.nbytes > self._max_bytes:
            return
        while self._bytes.total() + features.nbytes > self._max_bytes:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            _, dropped = self._by_tenant[largest].popitem(last=False)
            self._bytes[largest] -= dropped.nbytes
            if not self._by_tenant[largest]:
                del self._by_tenant[largest], self._bytes[largest]
        self._by_tenant.setdefault(tenant, OrderedDict())[digest] = features
        self._bytes[tenant] += features.nbytes


class Vision:
    """Frozen vision tower of one base model, whose results the decoder's modules read from the router."""

    def __init__(self, network: Any, processor: Any, router: Router) -> None:
        self.runs = 0  # of the tower, since the model was loaded
        self._model = network.model
        self._processor = processor
        self._cache = FeatureCache(CACHE_BYTES)
        size = processor.size
        self.facts = ImageFacts(
            side=processor.patch_size * processor.merge_size,
            least_pixels=size["shortest_edge"],
            most_pixels=size["longest_edge"],
            token=network.config.image_token_id,
        )
        _read_images(network.get_decoder(), router)

    def features(self, tenant: str, image: Image) -> torch.Tensor:
        """Return the results `[1 + L, n, d]` of the tower for an image, on the host.

        Raises:
            ImageUnusable: its data cannot be decoded, or have another number of tokens.
        """
        found = self._cache.get(tenant, image.digest)
        if found is None or found.shape[1] != image.tokens:
            self.runs += 1
            found = self._run(*self._pixels(image))
            self._cache.put(tenant, image.digest, found)
        return found

    def compute_blank(self, most_tokens: int) -> torch.Tensor:
        """Return the results of the tower for the largest blank image of at most `most_tokens`."""
        tokens = min(most_tokens, self.facts.most_pixels // self.facts.side**2)
        rows, merge = math.isqrt(tokens), self._processor.merge_size
        grid = torch.tensor([[1, merge * rows, merge * (tokens // rows)]])
        values = 3 * self._processor.temporal_patch_size * self._processor.patch_size**2
        return self._run(torch.zeros(int(grid.prod()), values), grid)

    def _run(self, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        """Return the results `[1 + L, n, d]` for patches `[4 n, values]` of one image, on the host."""
        where: torch.device = self._model.device
        # Results of inference mode could not be used by a later pass with gradients.
        with torch.inference_mode(mode=False), torch.no_grad():
            output = self._model.get_image_features(pixels.to(where), grid.to(where), return_dict=True)
            deep = getattr(output, "deepstack_features", None) or ()
            parts = [output.pooler_output, *deep]
            return torch.stack([part[0] for part in parts]).cpu()

    def _pixels(self, image: Image) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the patches of an image, and its grid of patches `[1, 3]`."""
        try:
            with PIL.Image.open(BytesIO(image.data), formats=("PNG", "JPEG")) as opened:
                if opened.width * opened.height > MAX_PIXELS:
                    raise ImageUnusable(f"An image has more than {MAX_PIXELS} pixels.")
                found = self._processor(images=[opened.convert("RGB")], return_tensors="pt")
        except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as broken:
            raise ImageUnusable(f"An image cannot be decoded: {broken}.") from broken
        grid = found["image_grid_thw"]
        merge = self._processor.merge_size
        if grid[0].tolist() != [1, merge * image.height, merge * image.width]:
            raise ImageUnusable(
                f"An image has {int(grid[0].prod()) // merge**2} tokens here and {image.tokens} in the request."
            )
        return found["pixel_values"], grid


def _read_images(decoder: nn.Module, router: Router) -> None:
    """Make a decoder read the router's images: into its embeddings, and the outputs of its first layers."""

    def fill(_module: Any, _given: Any, embeddings: torch.Tensor) -> torch.Tensor:
        images = router.images
        return embeddings if images is None else images.fill(embeddings)

    def adding(layer: int, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            hidden, images = forward(*args, **kwargs), router.images
            return hidden if images is None else images.add(layer, hidden)

        return run

    decoder.get_submodule("embed_tokens").register_forward_hook(fill)
    layers: Any = decoder.layers
    for number, layer in enumerate(layers):
        # Not a hook, which would be skipped for a layer that is recomputed or computed alone.
        layer.forward = adding(number, layer.forward)


def rotary_positions(length: int, images: Iterable[Image]) -> tuple[np.ndarray, int]:
    """Return the positions `[3, length]` of a sequence in time, height and width, and that of the next token.

    A token of text advances all three by 1. The tokens of an image have one time, and count rows and columns from
    there. The text after it continues behind the largest. This is `get_rope_index` of transformers for images.
    """
    positions = np.empty((3, length), np.int64)
    at = done = 0
    for image in images:
        text = image.start - done
        positions[:, done : image.start] = at + np.arange(text)
        at += text
        done = image.start + image.tokens
        rows, columns = np.divmod(np.arange(image.tokens), image.width)
        positions[:, image.start : done] = at + np.stack([np.zeros_like(rows), rows, columns])
        at += max(image.height, image.width)
    positions[:, done:] = at + np.arange(length - done)
    return positions, at + length - done


def image_key(images: Iterable[Image], start: int, stop: int) -> bytes:
    """Return bytes that name the parts of images at positions `start` to `stop` of a sequence; empty without one."""
    inside = [each for each in images if each.start < stop and each.start + each.tokens > start]
    return b"".join(each.digest + (each.start - start).to_bytes(8, "big", signed=True) for each in inside)


def image_rows(placed: Sequence[tuple[int, torch.Tensor]], device: torch.device) -> ImageRows | None:
    """Return features `[1 + L, n, d]`, each with its first row, as rows of a packed row; None if there are none."""
    if not placed:
        return None
    rows = np.concatenate([start + np.arange(each.shape[1]) for start, each in placed])
    features = torch.cat([each for _, each in placed], dim=1)
    return ImageRows(to_device(rows, device), to_device(features, device))
