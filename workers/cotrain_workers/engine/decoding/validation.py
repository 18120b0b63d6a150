"""Validation of sample requests on the host, before they use the device."""

import math

from cotrain_workers.engine.decoding.prompt_logprobs import SKIPPED
from cotrain_workers.engine.decoding.requests import SampleRequest


def refuse_sample(
    request: SampleRequest,
    *,
    vocab_size: int,
    max_sequence_tokens: int,
    has_text: bool,
    has_vision: bool = False,
) -> str | None:
    """Return the reason why this request can never run, as a sentence for the tenant, or None."""
    size = len(request.prompt)
    if size == 0:
        return "The prompt is empty; it has at least one token."
    if size > max_sequence_tokens:
        return (
            f"The prompt has {size} tokens; prompt and generated tokens together are at most "
            f"{max_sequence_tokens} here."
        )
    if request.images and not has_vision:
        return "This sampler reads no images."
    if request.stop_strings and not has_text:
        return "Stop strings need a tokenizer, and this model has none; stop at token ids."
    return (
        refuse_tokens(request, vocab_size)
        or refuse_counts(request, vocab_size)
        or refuse_shape_of_distribution(request)
    )


def refuse_tokens(request: SampleRequest, vocab_size: int) -> str | None:
    """Return the token id outside the vocabulary or the fault of the targets, as a sentence, or None."""
    size, targets = len(request.prompt), request.target_prompt_logprobs
    outside = (request.prompt < 0) | (request.prompt >= vocab_size)
    if outside.any():
        at = int(outside.argmax())
        return (
            f"Token id {request.prompt[at]} at position {at} of the prompt is outside the "
            f"vocabulary (0..{vocab_size - 1})."
        )
    if targets is None:
        return None
    if targets.ndim != 2 or targets.shape[0] != size - 1:
        return (
            f"target_prompt_logprobs has shape {list(targets.shape)}; it must be [{size - 1}, K]."
        )
    if ((targets < SKIPPED) | (targets >= vocab_size)).any():
        return f"target_prompt_logprobs names a token outside the vocabulary (0..{vocab_size - 1})."
    return None


def refuse_counts(request: SampleRequest, vocab_size: int) -> str | None:
    """Return the number that is out of range, as a sentence, or None."""
    if request.num_samples < 1:
        return f"num_samples is {request.num_samples}; it must be at least 1."
    if request.max_tokens is not None and request.max_tokens < 0:
        return f"max_tokens is {request.max_tokens}; it must not be negative."
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and last_n < 0:
        return f"prompt_logprobs_last_n is {last_n}; it must not be negative."
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "top_k"):
        k = getattr(request, name)
        if k > vocab_size:
            return f"{name} is {k}; the vocabulary has {vocab_size} tokens."
        if k < 0 and name != "top_k":
            return f"{name} is {k}; it must not be negative."
    return None


def refuse_shape_of_distribution(request: SampleRequest) -> str | None:
    """Return the fault of temperature or top_p, as a sentence, or None."""
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        return f"temperature is {request.temperature}; it must be 0 (greedy) or positive."
    if not 0 < request.top_p <= 1:
        return f"top_p is {request.top_p}; it must be above 0 and at most 1."
    return None
