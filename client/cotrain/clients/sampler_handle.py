"""Which sampler to sample from, as a string that may be passed to other processes and machines."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Self

from cotrain.wire.model import WireModel


class SamplerHandle(WireModel):
    """A sampler of a server. It opens nothing: to use it takes a key of the sampler's tenant."""

    base_url: str
    sampler_id: str
    base_model: str
    polls_in_batches: bool

    def text(self) -> str:
        """Write it as letters, digits, `-`, `_` and `=`."""
        return urlsafe_b64encode(self.model_dump_json().encode()).decode()

    @classmethod
    def of(cls, text: str) -> Self:
        """Read it. Raises ValueError for what is none."""
        try:
            return cls.model_validate_json(urlsafe_b64decode(text))
        except ValueError as error:
            message = "this is no handle of a sampler: get_sampler_handle() gives one"
            raise ValueError(message) from error
