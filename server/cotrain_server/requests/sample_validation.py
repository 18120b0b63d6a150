"""Validation of sample requests. Pure. Error messages are for the tenant.

An invalid request is refused at once: it has no position in an order, so nothing waits for it.
"""

from collections.abc import Sequence
from math import isfinite

from cotrain_server.errors import Invalid
from cotrain_server.requests.pass_validation import expert_choices
from cotrain_store.bodies.sample_body import SampleBody
from cotrain_store.messages.runs import PoolRecord

MAX_SAMPLES = 1_024
MAX_TOKENS = 2**31 - 1
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1_024
#: Total over all stop strings. A worker builds its matching tables from them between two tokens.
MAX_ALL_STOP_CHARACTERS = 4_096
#: Log-probs per position. A higher number costs bandwidth rather than computation.
MAX_TOPK = 128
#: Cells of `target_prompt_logprobs`, each of which returns one number.
MAX_TARGETS = 1 << 20
#: Log-probs of alternative tokens that one request may return in total, because a worker holds them
#: all in memory.
MAX_TOPK_CELLS = 1 << 24
#: Experts of tokens that one request may return in total: 256 MB to 512 MB.
MAX_ROUTED_EXPERTS = 1 << 28
SKIPPED = -1
"""Value of a `target_prompt_logprobs` cell that requests nothing."""


def check_sample(body: SampleBody, pool: PoolRecord) -> None:
    """Check a sample request against its base model.

    Raises:
        Invalid: the message names the field and its limit.
    """
    check_sampleable(pool)
    _check_prompt(body, pool)
    _check_range("num_samples", body.num_samples, 1, MAX_SAMPLES)
    if body.max_tokens is not None:
        _check_range("max_tokens", body.max_tokens, 0, MAX_TOKENS)
    _check_distribution(body, pool)
    _check_stop(body.stop, pool)
    _check_logprobs(body, pool)


def check_sampleable(pool: PoolRecord) -> None:
    """Raise Invalid if no worker samples from this base model."""
    if not is_sampleable(pool):
        raise Invalid(f"{pool.base_model} cannot be sampled from here.")


def is_sampleable(pool: PoolRecord) -> bool:
    """Return True if the workers of a pool can sample."""
    return pool.max_sequence_tokens > 0


def _check_prompt(body: SampleBody, pool: PoolRecord) -> None:
    length, limit = len(body.prompt), pool.max_sequence_tokens
    if not 1 <= length <= limit:
        raise Invalid(f"prompt has {length} tokens; {pool.base_model} samples from prompts of 1 to {limit}.")
    _check_tokens("prompt", body.prompt, pool.vocab_size)


def _check_distribution(body: SampleBody, pool: PoolRecord) -> None:
    if not (isfinite(body.temperature) and body.temperature >= 0):
        raise Invalid("temperature must be a finite number, 0 or more.")
    if not 0 < body.top_p <= 1:
        raise Invalid("top_p must be greater than 0 and at most 1.")
    if body.top_k != -1 and not 1 <= body.top_k <= pool.vocab_size:
        raise Invalid(f"top_k must be between 1 and {pool.vocab_size}, the size of the vocabulary, or -1 for no limit.")
    if body.seed is not None:
        _check_range("seed", body.seed, -(2**63), 2**64 - 1)


def _check_stop(stop: tuple[str, ...] | tuple[int, ...] | None, pool: PoolRecord) -> None:
    if not stop:
        return
    if len(stop) > MAX_STOPS:
        raise Invalid(f"stop has {len(stop)} entries; the limit is {MAX_STOPS}.")
    texts = [entry for entry in stop if isinstance(entry, str)]
    if not texts:
        _check_tokens("stop", [entry for entry in stop if isinstance(entry, int)], pool.vocab_size)
        return
    if not pool.tokenizer:
        raise Invalid(f"stop: {pool.base_model} has no tokenizer here, so it cannot stop at text; send token ids.")
    if not all(1 <= len(text) <= MAX_STOP_CHARACTERS for text in texts):
        raise Invalid(f"stop: each string must have 1 to {MAX_STOP_CHARACTERS} characters.")
    if sum(map(len, texts)) > MAX_ALL_STOP_CHARACTERS:
        raise Invalid(
            f"stop: the strings have {sum(map(len, texts))} characters together. The limit is "
            f"{MAX_ALL_STOP_CHARACTERS}."
        )


def _check_logprobs(body: SampleBody, pool: PoolRecord) -> None:
    limit = min(MAX_TOPK, pool.vocab_size)
    _check_range("topk_prompt_logprobs", body.topk_prompt_logprobs, 0, limit)
    _check_range("topk_sample_logprobs", body.topk_sample_logprobs, 0, limit)
    _check_answer(body, pool)
    last_n, positions = body.prompt_logprobs_last_n, len(body.prompt) - 1
    if last_n is not None:
        if not body.prompt_logprobs:
            raise Invalid("prompt_logprobs_last_n needs prompt_logprobs.")
        if not 1 <= last_n <= positions:
            raise Invalid(
                f"prompt_logprobs_last_n must be between 1 and {positions}, one less than the prompt has tokens."
            )
    if body.target_prompt_logprobs is not None:
        _check_targets(body.target_prompt_logprobs, positions, pool.vocab_size)
    if body.return_routed_experts:
        _check_routed_experts(body, pool)


def _check_routed_experts(body: SampleBody, pool: PoolRecord) -> None:
    layers, chosen, _ = expert_choices(pool, "return_routed_experts")
    if pool.sampler == "vllm":
        raise Invalid("return_routed_experts needs the sampler of the engine, not vLLM.")
    cells = (len(body.prompt) + body.num_samples * _most_tokens(body, pool)) * layers * chosen
    if cells > MAX_ROUTED_EXPERTS:
        raise Invalid(
            f"return_routed_experts: {body.num_samples} samples of up to {_most_tokens(body, pool)} tokens have {cells} "
            f"experts. The limit is {MAX_ROUTED_EXPERTS}. Ask for fewer samples or a smaller max_tokens."
        )


def _most_tokens(body: SampleBody, pool: PoolRecord) -> int:
    left_tokens = pool.max_sequence_tokens - len(body.prompt)
    return left_tokens if body.max_tokens is None else min(left_tokens, body.max_tokens)


def _check_answer(body: SampleBody, pool: PoolRecord) -> None:
    tokens = _most_tokens(body, pool)
    cells = body.num_samples * tokens * body.topk_sample_logprobs
    if cells > MAX_TOPK_CELLS:
        raise Invalid(
            f"topk_sample_logprobs: {body.num_samples} samples of up to {tokens} tokens with "
            f"{body.topk_sample_logprobs} each are {cells} log-probs; at most {MAX_TOPK_CELLS} are "
            "taken. Ask for fewer samples, a smaller max_tokens, or fewer log-probs."
        )


def _check_targets(targets: tuple[tuple[int, ...], ...], positions: int, vocab_size: int) -> None:
    if len(targets) != positions:
        raise Invalid(
            f"target_prompt_logprobs has {len(targets)} rows; the prompt has {positions} tokens after its first."
        )
    for row, ids in enumerate(targets):
        for column, token in enumerate(ids):
            if token != SKIPPED and not 0 <= token < vocab_size:
                raise Invalid(
                    f"target_prompt_logprobs[{row}, {column}] is {token}, which is outside the "
                    f"vocabulary (0..{vocab_size - 1}) and not {SKIPPED}."
                )


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise Invalid(f"{name} must be between {least} and {most}.")


def _check_tokens(name: str, ids: Sequence[int], vocab_size: int) -> None:
    if min(ids) >= 0 and max(ids) < vocab_size:
        return
    index = next(index for index, token in enumerate(ids) if not 0 <= token < vocab_size)
    raise Invalid(f"{name}: token id {ids[index]} at position {index} is outside the vocabulary (0..{vocab_size - 1}).")
