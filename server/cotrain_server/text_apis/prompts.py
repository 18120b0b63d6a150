"""Turn what was written into the sample requests of a base model, bounded before it is tokenized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cotrain_server.errors import Invalid
from cotrain_server.parsing.parser import THREAD_ABOVE
from cotrain_server.requests.sample_validation import check_sample
from cotrain_server.text_apis.detokenizer import TextGrowth

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cotrain_server.text_apis.chat_template import Message
    from cotrain_server.text_apis.detokenizer import Tokenizer
    from cotrain_server.text_apis.model_names import Target
    from cotrain_store.bodies.sample_body import SampleBody
    from cotrain_store.messages.pools import PoolRecord

#: English has four or five, code with its indentation eight. No tokenizer has sixteen on average of what
#: fills a context, and a text that is longer is no prompt for this model.
CHARACTERS_PER_TOKEN = 16
#: A context may be small; what a text of this length costs is small, too.
ALWAYS_READ = 64 * 1024
#: Of all prompts of one request together, where a single one may not be longer.
MOST_CHARACTERS = 4 * 1024**2
#: A character takes this much while it is cut into tokens.
_CHARACTER_WEIGHT = 200


def text_weight(characters: int) -> int:
    """Say what tokenizing weighs, as `Parser` counts it: never the event loop's work."""
    return THREAD_ABOVE + 1 + _CHARACTER_WEIGHT * characters


def longest_text(pool: PoolRecord) -> int:
    """Say how many characters of text the base model may be given."""
    return max(CHARACTERS_PER_TOKEN * pool.max_sequence_tokens, ALWAYS_READ)


def chat_body(
    target: Target,
    messages: Sequence[Message],
    body_of: Callable[[list[int]], SampleBody],
    options: Mapping[str, Any] | None = None,
    *,
    continue_final: bool = False,
) -> SampleBody:
    """Write a chat as the prompt of its next message, or of the rest of its last one.

    Raises:
        Invalid: it is too long, or there is no template, or that refuses it.
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
    """Make the sample request of each prompt, and where `echo` its text.

    Raises:
        Invalid: one is too long, or all together are.
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
    characters, most = written_characters(prompts), max(MOST_CHARACTERS, longest_text(pool))
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
    """Count the characters of a chat."""
    return sum(len(message["content"]) for message in messages)


def written_characters(prompts: Sequence[str | list[int]]) -> int:
    """Count the characters of those prompts that are text."""
    return sum(len(prompt) for prompt in prompts if isinstance(prompt, str))


def _check_length(field: str, characters: int, pool: PoolRecord) -> None:
    most = longest_text(pool)
    if characters > most:
        raise Invalid(
            f"{field}: {characters} characters; {pool.base_model} samples from prompts of up to "
            f"{pool.max_sequence_tokens} tokens, and of text no more than {most} characters are read."
        )


def _tokens(tokenizer: Tokenizer, prompt: str | list[int]) -> list[int]:
    return tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else prompt


def _text(tokenizer: Tokenizer, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    # The answer completes the character in which a prompt may end.
    return TextGrowth(tokenizer, begins=True).push(prompt, special=True)
