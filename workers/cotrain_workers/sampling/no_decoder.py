"""A decoder for what cannot generate tokens: it refuses each request, and says what would not."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from cotrain_workers.engine.decoding.requests import Progress

if TYPE_CHECKING:
    from cotrain_workers.engine.decoding.requests import SampleRequest

REFUSED = (
    "This base model is held by a group of processes, which trains and does not sample: each token would gather all "
    "its weights. Its operator can serve samples from a vLLM server (COTRAIN_SAMPLER=vllm, COTRAIN_VLLM_URL)."
)


class NoDecoder:
    """Implements `Decoder` for a group without a vLLM server."""

    busy = False
    kv_cache_ratio = None

    def refuse(self, _: SampleRequest) -> str | None:
        """Return why no request can run."""
        return REFUSED

    def add(self, request: SampleRequest) -> None:
        """Raise AssertionError: `refuse` lets nothing pass."""
        raise AssertionError(f"{request.id} was refused.")

    def cancel(self, _: str) -> None:
        """Do nothing: nothing runs."""

    def step(self) -> Progress:
        """Return that nothing was done."""
        return Progress(finished=[], tokens=(), decoded_tokens=0, prompt_tokens=0)

    @property
    def waiting(self) -> Counter[str]:
        """Return that nothing waits."""
        return Counter()

    def drop_weights(self, _: str) -> None:
        """Do nothing: none are held."""
