"""Conversion of text prompts to sample requests, with length limits before tokenizing."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from cotrain_server.errors import Invalid, PromptTooLong
from cotrain_server.parser import THREAD_ABOVE
from cotrain_server.requests.checkpoint_validation import check_loadable
from cotrain_server.requests.samples import check_sample, check_sampleable
from cotrain_server.services import Services
from cotrain_server.text_apis.chat_template import Message, Thinking
from cotrain_server.text_apis.grammars import answer_grammar, check_grammar
from cotrain_server.text_apis.message_parts import MessageFormat
from cotrain_server.text_apis.tokenizer import TextGrowth, Tokenizer
from cotrain_server.text_apis.tokenizer_cache import Language, language_of
from cotrain_server.text_apis.tools import OPEN_THINKING, ToolUse
from cotrain_store.bodies.sample_body import SampleBody
from cotrain_store.errors import BaseModelNotServed
from cotrain_store.messages.ids import SamplerId, SessionId, TenantId
from cotrain_store.messages.runs import CheckpointRecord, PoolRecord, SamplerRecord

SCHEME = "tinker://"
#: Limit of average characters per token. English has four or five, code with indentation eight. No
#: tokenizer averages sixteen over a full context, so a longer text cannot be a valid prompt.
CHARACTERS_PER_TOKEN = 16
#: Minimum limit for models with a small context: a text of this length is cheap to process.
ALWAYS_READ = 64 * 1024
#: Limit over all prompts of a request, unless the limit of a single prompt is higher.
MAX_CHARACTERS = 4 * 1024**2
#: Number of last tokens of a prompt in which the start of the reasoning is searched.
_END_TOKENS = 8
#: Weight of a character during tokenizing.
_CHARACTER_WEIGHT = 200


@dataclass(frozen=True)
class Weights:
    """Weights of a model name."""

    path: str  # empty for the base model
    checkpoint: CheckpointRecord | None
    pool: PoolRecord


@dataclass(frozen=True)
class Model:
    """Base model with tokenizer and chat template."""

    pool: PoolRecord
    language: Language


@dataclass(frozen=True)
class Target(Model):
    """A model with the sampler of some weights."""

    sampler: SamplerRecord


async def find_target(services: Services, tenant: TenantId, model: str) -> Target:
    """Return the target of a model name. Its sampler is created at the first request and reused afterwards.

    Raises Invalid without a tokenizer, and the errors of `find_weights`.
    """
    weights = await find_weights(services, tenant, model)
    language = await language_of(weights.pool, services.settings)
    sampler = await services.records.create_sampler(_sampler(tenant, weights))
    return Target(weights.pool, language, sampler)


async def find_weights(services: Services, tenant: TenantId, model: str) -> Weights:
    """Return the weights of a model name.

    Valid forms are `<base model>`, `tinker://<run>/sampler_weights/<name>`, or both as `<base model>;<path>`.

    Raises:
        BaseModelNotServed, CheckpointNotFound, MalformedPath: the tenant has no such model.
        Invalid: the two halves do not fit, or the model cannot be sampled.
    """
    base_model, path = _halves(model)
    checkpoint = await services.records.checkpoint(tenant, path) if path else None
    if checkpoint:
        await check_loadable(services, checkpoint)
    if checkpoint and base_model not in ("", checkpoint.base_model):
        raise Invalid(f"model: {path} was trained on {checkpoint.base_model}, not {base_model}.")
    pool = await services.records.pool_of(checkpoint.base_model if checkpoint else base_model)
    check_sampleable(pool)
    return Weights(path, checkpoint, pool)


def _halves(model: str) -> tuple[str, str]:
    """Return base model and path. Either may be empty."""
    base_model, _, path = model.partition(";")
    if base_model.startswith(SCHEME) and not path:
        return "", base_model
    if path and not path.startswith(SCHEME):
        raise BaseModelNotServed(f"{model!r} is neither a base model nor a {SCHEME} path.")
    return base_model, path


def _sampler(tenant: TenantId, found: Weights) -> SamplerRecord:
    pool, checkpoint, path = found.pool, found.checkpoint, found.path
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
        step=checkpoint.step if checkpoint else None,
    )


def text_weight(characters: int) -> int:
    """Return the weight of tokenizing for `Parser`, always above the limit of the event loop."""
    return THREAD_ABOVE + 1 + _CHARACTER_WEIGHT * characters


def longest_text(pool: PoolRecord) -> int:
    """Return the maximum length of a text for the base model, in characters."""
    return max(CHARACTERS_PER_TOKEN * pool.max_sequence_tokens, ALWAYS_READ)


@dataclass(frozen=True)
class Chat:
    """A chat whose next message the model writes."""

    messages: Sequence[Message]
    tools: ToolUse = ToolUse()  # noqa: RUF009  # it is frozen
    options: Mapping[str, Any] = field(default_factory=dict)  # Options of the model's template
    thinking: Thinking | None = None  # Setting of the reasoning; None for the model's own
    continues: bool = False  # True to continue the last message
    schema: Any = None  # JSON schema of the answer; None for a text

    @property
    def characters(self) -> int:
        """Number of characters, including those of tools."""
        values = [each for message in self.messages for name, each in message.items() if name != "role"]
        return _characters_of(values) + _characters_of(self.tools.functions)


def chat_prompt(model: Model, chat: Chat) -> list[int]:
    """Return the tokens of a chat, up to the model's continuation. Raises Invalid: it is too long, the model has no
    template, or the template refuses it.
    """
    template, pool = model.language.template, model.pool
    if template is None:
        raise Invalid("messages: this model has no chat template; send a text to completions.")
    _check_length("messages", chat.characters, pool)
    template.check_options(chat.options)
    if chat.tools.functions:
        template.check_tools()
    options = {**chat.options, **(template.thinking_options(chat.thinking) if chat.thinking else {})}
    text = template.render(chat.messages, options, tools=chat.tools.functions, continue_final=chat.continues)
    _check_length("messages", len(text), pool)
    prompt = model.language.tokenizer.encode(text, special=False)
    _check_tokens("messages", len(prompt), pool)
    return prompt


async def count_prompt_tokens(services: Services, tenant: TenantId, name: str, chat: Chat) -> int:
    """Return the number of prompt tokens of a chat. Raises the errors of `find_target` and `chat_prompt`."""
    pool = (await find_weights(services, tenant, name)).pool
    make = partial(chat_prompt, Model(pool, await language_of(pool, services.settings)), chat)
    return len(await services.parser.run(tenant, text_weight(chat.characters), make))


def chat_body(model: Model, chat: Chat, body_of: Callable[[list[int]], SampleBody]) -> tuple[SampleBody, MessageFormat]:
    """Return the sample request of a chat's next message, and the format of the answer. Raises Invalid: the errors of
    `chat_prompt`, or a wrong field.
    """
    body = _checked(body_of(chat_prompt(model, chat)), model.pool)
    template = model.language.template
    assert template is not None
    tokenizer = model.language.tokenizer
    end = tokenizer.decode(body.prompt[-_END_TOKENS:], special=True)
    format = MessageFormat(
        form=template.tool_form if chat.tools.functions else None,
        tools=chat.tools.schemas,
        is_single=chat.tools.is_single,
        has_thinking=template.has_thinking,
        begins_thinking=template.has_thinking and end.rstrip().endswith(OPEN_THINKING),
    )
    grammar = answer_grammar(chat.schema, chat.tools, format, tokenizer)
    return replace(body, grammar=grammar), format


async def accepted_chat(
    services: Services, target: Target, chat: Chat, body_of: Callable[[list[int]], SampleBody]
) -> tuple[SampleBody, MessageFormat]:
    """Run `chat_body` in a thread, and check its grammar in a child process."""
    tenant, run = target.sampler.tenant, services.parser.run
    make = partial(chat_body, target, chat, body_of)
    body, format = await run(tenant, text_weight(chat.characters), make)
    if body.grammar is not None:
        where = "response_format" if chat.schema is not None else "tools"
        await services.parser.run_in_child(tenant, check_grammar, body.grammar, where)
    return body, format


def prompt_bodies(
    target: Target,
    prompts: Sequence[str | list[int]],
    body_of: Callable[[list[int]], SampleBody],
    *,
    echo: bool,
    special: bool = True,
) -> tuple[list[SampleBody], list[str]]:
    """Return the sample request of each prompt, and with `echo` its text. With `special`, texts get
    the control tokens that the model expects around them. Raises Invalid: one prompt is too long, or all together are.
    """
    pool, tokenizer = target.pool, target.language.tokenizer
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_length("prompt", len(prompt), pool)
        else:
            _check_tokens("prompt", len(prompt), pool)
    characters, most = written_characters(prompts), max(MAX_CHARACTERS, longest_text(pool))
    if characters > most:
        raise Invalid(
            f"prompt: the texts of one request have at most {most} characters together, not "
            f"{characters}. Send them in several requests."
        )
    bodies = []
    for prompt in prompts:
        tokens = _tokens(tokenizer, prompt, special=special)
        _check_tokens("prompt", len(tokens), pool)
        bodies.append(_checked(body_of(tokens), pool))
    return bodies, [_text(tokenizer, prompt) for prompt in prompts] if echo else []


def _characters_of(value: Any) -> int:
    """Return the number of characters of all texts in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + _characters_of(each) for key, each in value.items())
    return sum(map(_characters_of, value)) if isinstance(value, Sequence) else 1


def written_characters(prompts: Sequence[str | list[int]]) -> int:
    """Return the number of characters of the text prompts."""
    return sum(len(prompt) for prompt in prompts if isinstance(prompt, str))


def _check_length(field: str, characters: int, pool: PoolRecord) -> None:
    most = longest_text(pool)
    if characters > most:
        raise PromptTooLong(
            f"{field} has {characters} characters. {pool.base_model} samples from prompts of up to "
            f"{pool.max_sequence_tokens} tokens, for which at most {most} characters are accepted."
        )


def _check_tokens(field: str, tokens: int, pool: PoolRecord) -> None:
    most = pool.max_sequence_tokens
    if tokens > most:
        # Clients recognize a full context by this sentence.
        raise PromptTooLong(f"{field} has {tokens} tokens. This model's maximum context length is {most} tokens.")


def _checked(body: SampleBody, pool: PoolRecord) -> SampleBody:
    """Return a checked body. A `top_k` above the size of the vocabulary is no limit."""
    if body.top_k > pool.vocab_size:
        body = replace(body, top_k=-1)
    check_sample(body, pool)
    return body


def _tokens(tokenizer: Tokenizer, prompt: str | list[int], *, special: bool) -> list[int]:
    """Return the tokens of a prompt. Control tokens that its text begins with are not added again."""
    if not isinstance(prompt, str):
        return prompt
    tokens = tokenizer.encode(prompt, special=special)
    may_be_double = special and tokens[:1] and tokens[0] in tokens[1:]
    added = tokenizer.count_added_before(tokens) if may_be_double else 0
    is_double = added and tokens[added : 2 * added] == tokens[:added]
    return tokens[added:] if is_double else tokens


def _text(tokenizer: Tokenizer, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    # The answer completes the character in which a prompt may end.
    return TextGrowth(tokenizer, begins=True).push(prompt, special=True)
