"""Chat data: conversations in OpenAI's format, rendered by the tokenizer's own template to datums with exact masks.

from cotrain import data

rendered = data.render(data.read_chat("train.jsonl"), tokenizer, train_on="all_answers")
print(rendered.report.sentence())
print(data.marked(rendered.datums[0], tokenizer))

An answer begins after the tokens that the template gives for the messages before it, with the prompt for
generation. So its first trained token is the first one that a sampler would generate. It ends with the
template's end of the message. Both are found by comparing tokens, never by searching for texts.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

from cotrain.errors import TokenizerMissing, UnsupportedInput
from cotrain.wire.datums import Datum, ModelInput, token_ids

__all__ = [
    "Conversation", "Rendered", "Report", "conversation_of", "marked", "read_chat", "render",
]  # fmt: skip

Message = Mapping[str, Any]
TrainOn = Literal["last_answer", "all_answers", "each_answer"]
TooLong = Literal["refuse", "cut", "drop"]
OnRefused = Literal["raise", "skip"]
_ASSISTANT = "assistant"

log = logging.getLogger("cotrain")


@dataclass(frozen=True)
class Conversation:
    """Messages with `role` and `content`, and the tools that the model may call."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    source: str = ""
    """Its position for messages, such as `train.jsonl:12`."""

    @property
    def answers(self) -> list[int]:
        """Positions of the assistant's messages, without those of `weight` 0."""
        return [
            number
            for number, message in enumerate(self.messages)
            if message["role"] == _ASSISTANT and message.get("weight", 1) != 0
        ]


@dataclass
class Report:
    """Counts of a rendering."""

    conversations: int = 0
    datums: int = 0
    tokens: int = 0
    """Number of tokens in all model inputs."""
    trained_tokens: int = 0
    """Targets with a weight other than 0."""
    longest: int = 0
    cut: int = 0
    """Datums without their end."""
    cut_tokens: int = 0
    dropped: int = 0
    """Datums that were too long, or had nothing to train on after a cut."""
    refused: list[str] = field(default_factory=list)
    """Reasons, one for each conversation left out."""

    def sentence(self) -> str:
        """Return the counts as one sentence."""
        share = self.trained_tokens / self.tokens if self.tokens else 0.0
        text = (
            f"{self.conversations} conversations gave {self.datums} datums of {self.tokens:,} tokens "
            f"({self.trained_tokens:,} trained on, {share:.0%}; the longest has {self.longest:,})"
        )
        if self.cut:
            text += f"; {self.cut} lost their end ({self.cut_tokens:,} tokens)"
        if self.dropped:
            text += f"; {self.dropped} were dropped as too long"
        if self.refused:
            text += f"; {len(self.refused)} were refused, first: {self.refused[0]}"
        return text


@dataclass(frozen=True)
class Rendered:
    """Datums for `forward_backward(…, "cross_entropy")`, and their counts."""

    datums: list[Datum]
    report: Report


def read_chat(file: str | Path) -> list[Conversation]:
    """Read conversations, one JSON object in each line: `{"messages": [...], "tools": [...]}`.

    Raises UnsupportedInput, which names the line and the field, or OSError.
    """
    found = []
    with Path(file).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            source = f"{Path(file).name}:{number}"
            try:
                row = json.loads(line.rstrip())
            except ValueError as error:
                raise UnsupportedInput(f"{source} is not JSON: {error}") from None
            found.append(conversation_of(row, source))
    return found


def conversation_of(row: Any, source: str = "the conversation") -> Conversation:
    """Return the conversation of a parsed line. Raises UnsupportedInput, which names the field.

    Content in parts becomes text. Arguments of tool calls become objects, because templates print them as JSON.
    """
    if isinstance(row, Conversation):
        return row
    if not isinstance(row, Mapping) or not isinstance(row.get("messages"), list | tuple):
        keys = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise UnsupportedInput(f"{source} has no list `messages` of role and content (it has {keys})")
    messages = tuple(
        _message(message, f"{source}: messages[{number}]") for number, message in enumerate(row["messages"])
    )
    if not any(message["role"] == _ASSISTANT for message in messages):
        raise UnsupportedInput(f"{source}: messages has no answer (role assistant) to train on")
    return Conversation(messages, tuple(row.get("tools") or ()), source)


def render(
    rows: Iterable[Conversation | Mapping[str, Any]],
    tokenizer: Any,
    *,
    train_on: TrainOn = "last_answer",
    prompt_weight: float = 0.0,
    max_tokens: int | None = None,
    too_long: TooLong = "refuse",
    on_refused: OnRefused = "raise",
    template_options: Mapping[str, Any] | None = None,
) -> Rendered:
    """Render conversations with the tokenizer's chat template.

    Args:
        rows: Conversations, or objects with `messages` and `tools`.
        tokenizer: One of transformers, with a chat template.
        train_on: `last_answer`, `all_answers` in one datum, or `each_answer` in a datum of its own.
        prompt_weight: Weight of all other tokens; answers have weight 1.
        max_tokens: Longest model input. None: no limit here, but the server has one.
        too_long: `refuse`, `cut` the end, or `drop` the datum. The report counts both.
        on_refused: `raise`, or `skip` the conversation and list the reason in the report.
        template_options: Variables of the template, such as `{"enable_thinking": False}`.

    Raises UnsupportedInput, which names the conversation, or TokenizerMissing.
    """
    for name, value, known in (
        ("train_on", train_on, TrainOn),
        ("too_long", too_long, TooLong),
        ("on_refused", on_refused, OnRefused),
    ):
        if value not in get_args(known):
            raise UnsupportedInput(f"{name} is one of {', '.join(get_args(known))}, not {value!r}")
    if max_tokens is not None and max_tokens < 1:
        raise UnsupportedInput(f"max_tokens must be at least 1, not {max_tokens}")
    template = _Template(tokenizer, dict(template_options or {}))
    report, datums = Report(), []
    for number, row in enumerate(rows):
        report.conversations += 1
        try:
            conversation = conversation_of(row, f"rows[{number}]")
            for tokens, weights in _weighted(template, conversation, train_on, prompt_weight):
                datum = _datum(tokens, weights, conversation, max_tokens, too_long, report)
                datums += [datum] if datum else []
        except UnsupportedInput as refused:
            if on_refused == "raise":
                raise
            report.refused.append(str(refused))
    if report.cut or report.dropped or report.refused:
        log.warning("%s", report.sentence())
    return Rendered(datums, report)


def marked(datum: Datum, tokenizer: Any) -> str:
    """Return the text of a datum with ⟦brackets⟧ around the trained parts.

    Another weight than 1 follows its opening bracket, as in `⟦0.1: text⟧`.
    """
    return "".join(
        text if not weight else f"⟦{'' if weight == 1 else f'{weight:g}: '}{text}⟧"
        for text, weight in parts(datum, tokenizer)
    )


def parts(datum: Datum, tokenizer: Any) -> Iterator[tuple[str, float]]:
    """Yield texts with the weight of their tokens. The first token is no target, so its weight is 0."""
    inputs = datum.loss_fn_inputs
    tokens = [*datum.model_input.to_ints()[:1], *map(int, inputs["target_tokens"].data)]
    weights = [0.0, *map(float, inputs["weights"].data)]
    for weight, group in groupby(zip(tokens, weights, strict=True), key=lambda pair: pair[1]):
        yield tokenizer.decode([token for token, _ in group]), weight


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UnsupportedInput(f"{where} must be an object with a `role`")
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    content = message.get("content")
    if content is None and not calls:
        raise UnsupportedInput(f"{where}.content is missing")
    if message.get("weight") not in (None, 0, 1):
        raise UnsupportedInput(f"{where}.weight must be 0 or 1, not {message['weight']!r}")
    given = {**message, "content": _text(content, where)}
    return {**given, "tool_calls": calls} if calls else given


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise UnsupportedInput(f"{where}.content must be text, not {kind}")
    return "".join(part["text"] for part in parts)


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class _Template:
    """Chat template of a tokenizer."""

    def __init__(self, tokenizer: Any, options: dict[str, Any]) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise UnsupportedInput(
                "the tokenizer has no chat template: use that of the instruct model, or a renderer of tinker_cookbook"
            )
        self.tokenizer = tokenizer
        self._options = options

    def check_tools(self, conversation: Conversation) -> None:
        """Raise UnsupportedInput if the template would leave out tools or their calls."""
        calls = any(message.get("tool_calls") for message in conversation.messages)
        for name, given in (("tools", conversation.tools), ("tool_calls", calls)):
            if given and name not in str(self.tokenizer.chat_template):
                raise UnsupportedInput(
                    f"{conversation.source}: the chat template leaves out `{name}`: use a model whose template has them, "
                    f"or remove `{name}`"
                )

    def tokens(self, conversation: Conversation, count: int, *, prompt: bool = False) -> list[int]:
        """Return the tokens of the first `count` messages, with the prompt for generation if `prompt`."""
        messages = [
            {name: value for name, value in message.items() if name != "weight"}
            for message in conversation.messages[:count]
        ]
        try:
            return token_ids(
                self.tokenizer.apply_chat_template(
                    messages,
                    tools=[dict(tool) for tool in conversation.tools] or None,
                    add_generation_prompt=prompt,
                    tokenize=True,
                    return_dict=True,
                    **self._options,
                )
            )
        except ImportError as error:
            raise TokenizerMissing(
                "chat templates need jinja2: pip install -c constraints.txt '.[tokenizer]'"
            ) from error
        except Exception as error:  # templates raise TemplateError, TypeError and others for a message
            raise UnsupportedInput(
                f"{conversation.source}: the chat template refuses these messages: {error}"
            ) from error


def _weighted(
    template: _Template, conversation: Conversation, train_on: TrainOn, prompt_weight: float
) -> list[tuple[list[int], list[float]]]:
    """Return tokens and their weights, for each datum of a conversation."""
    template.check_tools(conversation)
    messages, answers = conversation.messages, conversation.answers
    if train_on == "last_answer" and messages[-1]["role"] != _ASSISTANT:
        raise UnsupportedInput(
            f"{conversation.source} ends with a message of {messages[-1]['role']!r}: last_answer needs an answer "
            "at the end"
        )
    if not answers:
        raise UnsupportedInput(f"{conversation.source}: every answer has weight 0")
    if train_on == "last_answer" and answers[-1] != len(messages) - 1:
        raise UnsupportedInput(f"{conversation.source} ends with an answer of weight 0: last_answer trains no other")
    if train_on == "each_answer":
        return [_masked(template, conversation, answer + 1, [answer], prompt_weight) for answer in answers]
    chosen = answers if train_on == "all_answers" else answers[-1:]
    return [_masked(template, conversation, len(messages), chosen, prompt_weight)]


def _masked(
    template: _Template, conversation: Conversation, count: int, answers: Sequence[int], prompt_weight: float
) -> tuple[list[int], list[float]]:
    """Return the tokens of the first `count` messages, with weight 1 for the messages at `answers`.

    Raises UnsupportedInput if an answer's tokens cannot be separated from the others.
    """
    whole = template.tokens(conversation, count)
    weights = [float(prompt_weight)] * len(whole)
    for answer in answers:
        where = f"{conversation.source}: messages[{answer}]"
        before = template.tokens(conversation, answer, prompt=True)
        after = whole
        if answer + 1 < count:
            after = template.tokens(conversation, answer + 1)
            if (at := _difference(after, whole)) is not None:
                raise UnsupportedInput(
                    f"{where}: the template writes this message otherwise once others follow "
                    f"({_shown_difference(template, after, whole, at)}). all_answers would train on texts that a sampler "
                    "never reads: use train_on='each_answer', or 'last_answer'"
                )
        if (at := _difference(before, after)) is not None:
            raise UnsupportedInput(
                f"{where}: the answer does not continue the prompt for generation "
                f"({_shown_difference(template, before, after, at)}). Check template_options and the whitespace at the "
                "answer's beginning, or use a renderer of tinker_cookbook"
            )
        end = _end_of(template, after, len(before))
        weights[len(before) : end] = [1.0] * (end - len(before))
    return whole, weights


def _difference(beginning: Sequence[int], whole: Sequence[int]) -> int | None:
    """Return the first position where `whole` does not begin with `beginning`, or None."""
    if whole[: len(beginning)] == beginning:
        return None
    pairs = zip(beginning, whole, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(whole))


def _shown_difference(template: _Template, a: Sequence[int], b: Sequence[int], at: int) -> str:
    """Return the texts of both from the position of a difference, for an error."""
    texts = (template.tokenizer.decode(list(each[at : at + 8])) for each in (a, b))
    return "{!r} in place of {!r}".format(*texts)


def _end_of(template: _Template, tokens: Sequence[int], start: int) -> int:
    """Return the end of an answer, without whitespace that the template adds after the last special token."""
    special = set(template.tokenizer.all_special_ids)
    end = len(tokens)
    while end > start and not template.tokenizer.decode([tokens[end - 1]]).strip():
        if tokens[end - 1] in special:
            break
        end -= 1
    return end if end > start and tokens[end - 1] in special else len(tokens)


def _datum(
    tokens: list[int],
    weights: list[float],
    conversation: Conversation,
    max_tokens: int | None,
    too_long: TooLong,
    report: Report,
) -> Datum | None:
    """Return the datum: inputs without the last token, targets and weights without the first."""
    length = len(tokens) - 1
    if max_tokens is not None and length > max_tokens:
        if too_long == "refuse":
            raise UnsupportedInput(
                f"{conversation.source} has {length} tokens, max_tokens is {max_tokens}: "
                "set too_long to cut or drop, or raise max_tokens"
            )
        if too_long == "drop" or not any(weights[1 : max_tokens + 1]):
            report.dropped += 1
            return None
        report.cut += 1
        report.cut_tokens += length - max_tokens
        tokens, weights, length = tokens[: max_tokens + 1], weights[: max_tokens + 1], max_tokens
    report.datums += 1
    report.tokens += length
    report.trained_tokens += sum(weight != 0 for weight in weights[1:])
    report.longest = max(report.longest, length)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )
