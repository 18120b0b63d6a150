"""Images in the bodies of requests: checks of hostile data, and the number of their tokens."""

from dataclasses import dataclass
from io import BytesIO
from math import ceil, floor, sqrt

#: Limit on one image: a decoded one takes up to 128 MiB. Phones take pictures of 12,000,000 pixels.
MAX_PIXELS = 1 << 24
#: Limits on all images of one request. Decoding takes up to 0.5 s for each 16,000,000 pixels.
MAX_REQUEST_PIXELS = 1 << 28
MAX_IMAGES = 1024
#: Limit on the scans of a progressive JPEG, each of which is a pass over all of its pixels. Cameras write at most 14.
MAX_SCANS = 50
MAX_ASPECT = 200  # larger side / smaller side; the preprocessing of transformers refuses more

_SCAN = b"\xff\xda"
_FORMATS = {"png": ("PNG",), "jpeg": ("JPEG", "MPO")}  # MPO: a JPEG followed by smaller copies


class UnusableImage(ValueError):
    """An image cannot be read; the message follows the name of its field."""


@dataclass(frozen=True)
class ImageRules:
    """Facts of a base model by which the tokens of an image are counted."""

    side: int  # pixels of a token's side
    least_pixels: int  # smaller images are enlarged to these
    most_pixels: int  # larger ones are reduced
    token: int  # id of the placeholder of each token


@dataclass(frozen=True)
class BodyImage:
    """Image in a sequence, with one token for each cell of its grid, row by row."""

    start: int  # position of its first token
    height: int  # rows of the grid
    width: int
    data: bytes

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.height * self.width


class ImageReader:
    """Reader of the images of one request, with limits on all of them."""

    def __init__(self, rules: ImageRules) -> None:
        self._rules = rules
        self._images = self._pixels = 0

    def read(self, data: bytes, declared: str, expected_tokens: int | None) -> tuple[int, int]:
        """Decode an image and return its grid in tokens: rows, columns. Raises UnusableImage: it is broken, exceeds a
        limit, or has another format or number of tokens than declared.
        """
        self._images += 1
        if self._images > MAX_IMAGES:
            raise UnusableImage(f"is image {self._images} of the request, which may have {MAX_IMAGES}.")
        if declared not in _FORMATS:
            raise UnusableImage(f"has format {declared!r:.20}; send png or jpeg.")
        grid = self._decoded(data, declared)
        tokens = grid[0] * grid[1]
        if expected_tokens is not None and expected_tokens != tokens:
            raise UnusableImage(
                f"has expected_tokens={expected_tokens}, but {tokens} tokens with this base model "
                f"({grid[0]} rows of {grid[1]})."
            )
        return grid

    def _decoded(self, data: bytes, declared: str) -> tuple[int, int]:
        import PIL.Image  # by the few processes that receive images

        if data.count(_SCAN) > MAX_SCANS and declared == "jpeg":
            raise UnusableImage(f"has more than {MAX_SCANS} scans. Save it as a baseline JPEG.")
        try:
            opened = PIL.Image.open(BytesIO(data), formats=("PNG", "JPEG"))
        except PIL.Image.DecompressionBombError as bomb:  # far above our limit
            raise UnusableImage(f"has more pixels than the limit of {MAX_PIXELS}. Reduce it.") from bomb
        except Exception as broken:  # decoders raise exceptions of any type at hostile bytes
            raise UnusableImage("is neither a PNG nor a JPEG file.") from broken
        with opened:
            if opened.format not in _FORMATS[declared]:
                raise UnusableImage(f"is a {opened.format} file with format={declared!r}.")
            self._check_size(*opened.size)
            if opened.format == "PNG" and getattr(opened, "n_frames", 1) > 1:
                raise UnusableImage("is an animation. Send its frames as images.")
            try:
                opened.load()
            except Exception as broken:  # see above
                raise UnusableImage(f"cannot be decoded: {str(broken) or 'it is broken'!s:.200}.") from broken
            return grid_of(*opened.size, self._rules)

    def _check_size(self, width: int, height: int) -> None:
        if width * height > MAX_PIXELS:
            raise UnusableImage(f"has {width} x {height} pixels; the limit is {MAX_PIXELS}. Reduce it.")
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise UnusableImage(f"has {width} x {height} pixels; one side may be {MAX_ASPECT} times the other.")
        self._pixels += width * height
        if self._pixels > MAX_REQUEST_PIXELS:
            raise UnusableImage(
                f"is beyond the limit of {MAX_REQUEST_PIXELS} pixels for all images of a request. "
                "Send them in several calls."
            )


def grid_of(width: int, height: int, rules: ImageRules) -> tuple[int, int]:
    """Return the grid of tokens of an image in pixels: rows, columns.

    The sides are rounded to tokens, and scaled until the area is within the limits: `smart_resize` of transformers.
    """
    side, area = rules.side, width * height
    rows, columns = round(height / side), round(width / side)
    if rows * columns * side**2 > rules.most_pixels:
        scale = sqrt(area / rules.most_pixels)
        rows, columns = (max(1, floor(each / scale / side)) for each in (height, width))
    elif rows * columns * side**2 < rules.least_pixels:
        scale = sqrt(rules.least_pixels / area)
        rows, columns = (ceil(each * scale / side) for each in (height, width))
    return rows, columns
