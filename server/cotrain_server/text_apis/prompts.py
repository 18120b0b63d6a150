"""Conversion of text prompts to sample requests, with length limits before tokenizing."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cotrain_server.errors import Invalid
from cotrain_server.parsing.parser import THREAD_ABOVE
from cotrain_server.requests.checkpoint_validation import check_loadable
from cotrain_server.requests.sample_validation import check_sample, check_sampleable
from cotrain_server.services import Services
from cotrain_server.text_apis.chat_template import Message
from cotrain_server.text_apis.tokenizer_cache import Language, TextGrowth, Tokenizer, language_of
from cotrain_store.bodies.sample_body import SampleBody
from cotrain_store.errors import BaseModelNotServed
from cotrain_store.messages.ids import SamplerId, SessionId, TenantId
from cotrain_store.messages.runs import PoolRecord
from cotrain_store.messages.samples import SamplerRecord
from cotrain_store.messages.saves import CheckpointRecord

SCHEME = "tinker://"


@dataclass(frozen=True)
class Target:
    """Sampler with its pool, tokenizer and chat template."""

    sampler: SamplerRecord
    pool: PoolRecord
    language: Language


async def find_target(services: Services, tenant: TenantId, model: str) -> Target:
    """Return the target of a model name. Its sampler is created at the first request and reused
    afterwards.

    Valid forms are `<base model>`, `tinker://<run>/sampler_weights/<name>`, or both as
    `<base model>;<path>`.

    Raises:
        BaseModelNotServed, CheckpointNotFound, MalformedPath: the tenant has no such model.
        Invalid: the two halves do not fit, or the model cannot be sampled as text.
    """
    base_model, path = _halves(model)
    checkpoint = await services.records.checkpoint(tenant, path) if path else None
    if checkpoint:
        check_loadable(checkpoint)
    if checkpoint and base_model not in ("", checkpoint.base_model):
        raise Invalid(f"model: {path} was trained on {checkpoint.base_model}, not {base_model}.")
    pool = await services.records.pool_of(checkpoint.base_model if checkpoint else base_model)
    check_sampleable(pool)
    language = await language_of(pool, services.settings)
    sampler = _sampler(tenant, pool, checkpoint, path)
    return Target(await services.records.create_sampler(sampler), pool, language)


def _halves(model: str) -> tuple[str, str]:
    """Return base model and path. Either may be empty."""
    base_model, _, path = model.partition(";")
    if base_model.startswith(SCHEME) and not path:
        return "", base_model
    if path and not path.startswith(SCHEME):
        raise BaseModelNotServed(f"{model!r} is neither a base model nor a {SCHEME} path.")
    return base_model, path


def _sampler(
    tenant: TenantId, pool: PoolRecord, checkpoint: CheckpointRecord | None, path: str
) -> SamplerRecord:
    weights = checkpoint.weights if checkpoint else None
    # The id is derived from all properties, so a renamed checkpoint gives another sampler. A
    # session opened by a client never has such an id.
    made_of = "\0".join([tenant, pool.id, path, weights or ""])
    session = SessionId("words-" + hashlib.sha256(made_of.encode()).hexdigest()[:32])
    return SamplerRecord(
        id=SamplerId(f"{session}:sample:0"),
        tenant=tenant,
        session=session,
        pool=pool.id,
        base_model=pool.base_model,
        model_path=path or None,
        weights=weights,
        ephemeral=False,
        created_at=time.time(),
    )


#: Limit of average characters per token. English has four or five, code with indentation eight. No
#: tokenizer averages sixteen over a full context, so a longer text cannot be a valid prompt.
CHARACTERS_PER_TOKEN = 16
#: Minimum limit for models with a small context: a text of this length is cheap to process.
ALWAYS_READ = 64 * 1024
#: Limit over all prompts of a request, unless the limit of a single prompt is higher.
MAX_CHARACTERS = 4 * 1024**2
#: Weight of a character during tokenizing.
_CHARACTER_WEIGHT = 200


def text_weight(characters: int) -> int:
    """Return the weight of tokenizing for `Parser`, always above the limit of the event loop."""
    return THREAD_ABOVE + 1 + _CHARACTER_WEIGHT * characters


def longest_text(pool: PoolRecord) -> int:
    """Return the maximum length of a text for the base model, in characters."""
    return max(CHARACTERS_PER_TOKEN * pool.max_sequence_tokens, ALWAYS_READ)


def chat_body(
    target: Target,
    messages: Sequence[Message],
    body_of: Callable[[list[int]], SampleBody],
    options: Mapping[str, Any] | None = None,
    *,
    continue_final: bool = False,
) -> SampleBody:
    """Return the sample request of a chat's next message, or of the rest of its last one.

    Raises:
        Invalid: it is too long, or the model has no template, or the template refuses it.
    """
    template, pool = target.language.template, target.pool
    if template is None:
        raise Invalid("messages: this model has no chat template; send a text to completions.")
    _check_length("messages", characters_of(messages), pool)
    text = template.render(messages, options, continue_final=continue_final)
    _check_length("messages", len(text), pool)
    body = body_of(target.language.tokenizer.encode(text, special=False))
    check_sample(body, pool)
    return body


def prompt_bodies(
    target: Target,
    prompts: Sequence[str | list[int]],
    body_of: Callable[[list[int]], SampleBody],
    *,
    echo: bool,
) -> tuple[list[SampleBody], list[str]]:
    """Return the sample request of each prompt, and with `echo` its text.

    Raises:
        Invalid: one prompt is too long, or all together are.
    """
    pool, tokenizer = target.pool, target.language.tokenizer
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_length("prompt", len(prompt), pool)
        elif len(prompt) > pool.max_sequence_tokens:
            raise Invalid(
                f"prompt has {len(prompt)} tokens; {pool.base_model} samples from prompts of 1 to "
                f"{pool.max_sequence_tokens}."
            )
    characters, most = written_characters(prompts), max(MAX_CHARACTERS, longest_text(pool))
    if characters > most:
        raise Invalid(
            f"prompt: the texts of one request have at most {most} characters together, not "
            f"{characters}. Send them in several requests."
        )
    bodies = [body_of(_tokens(tokenizer, prompt)) for prompt in prompts]
    for body in bodies:
        check_sample(body, pool)
    return bodies, [_text(tokenizer, prompt) for prompt in prompts] if echo else []


def characters_of(messages: Sequence[Message]) -> int:
    """Return the number of characters of a chat."""
    return sum(len(message["content"]) for message in messages)


def written_characters(prompts: Sequence[str | list[int]]) -> int:
    """Return the number of characters of the text prompts."""
    return sum(len(prompt) for prompt in prompts if isinstance(prompt, str))


def _check_length(field: str, characters: int, pool: PoolRecord) -> None:
    most = longest_text(pool)
    if characters > most:
        raise Invalid(
            f"{field} has {characters} characters. {pool.base_model} samples from prompts of up to "
            f"{pool.max_sequence_tokens} tokens, for which at most {most} characters are accepted."
        )


def _tokens(tokenizer: Tokenizer, prompt: str | list[int]) -> list[int]:
    return tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else prompt


def _text(tokenizer: Tokenizer, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    # The answer completes the character in which a prompt may end.
    return TextGrowth(tokenizer, begins=True).push(prompt, special=True)
