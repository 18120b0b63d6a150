"""Parts of a message of a model: reasoning, text and tool calls, from streamed text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple

from cotrain_server.text_apis.token_texts import possible_start
from cotrain_server.text_apis.tokenizer import Tokenizer
from cotrain_server.text_apis.tools import (
    CLOSE_THINKING,
    MARKER_TOKENS,
    OPEN_THINKING,
    Call,
    ToolForm,
    Tools,
    read_calls,
)


class Text(NamedTuple):
    """Further text of the message."""

    text: str


class Reasoning(NamedTuple):
    """Further text of the model's reasoning."""

    text: str


Segment = Text | Reasoning | Call


@dataclass(frozen=True)
class MessageFormat:
    """Format of the messages of a model. The default is plain text."""

    form: ToolForm | None = None  # Form of tool calls; None to leave them in the text
    tools: Tools = field(default_factory=dict)
    is_single: bool = False  # True to drop all calls after the first one
    has_thinking: bool = False  # True if a message may begin with reasoning
    begins_thinking: bool = False  # True if the prompt already ends with the start of the reasoning

    @property
    def is_plain(self) -> bool:
        """True if the whole message is text."""
        return self.form is None and not self.has_thinking


def shown_tokens(tokenizer: Tokenizer, format: MessageFormat) -> frozenset[int]:
    """Return the control tokens that a text must include to find the parts of a message."""
    return frozenset() if format.is_plain else tokenizer.control_tokens(MARKER_TOKENS)


def text_in(segments: Sequence[Segment]) -> str:
    """Return the text of some segments, without reasoning and calls."""
    return "".join(segment.text for segment in segments if isinstance(segment, Text))


class _State(Enum):
    START = auto()
    THINKING = auto()
    TEXT = auto()
    CALL = auto()


class MessageParts:
    """Splitter of one message. It withholds text that may belong to a marker or precede a call."""

    def __init__(self, format: MessageFormat) -> None:
        self._format = format
        self._form = format.form
        self._state = _State.THINKING if format.begins_thinking else _State.START
        self._pending = ""
        self._is_trimmed = format.begins_thinking
        """True if the next part loses its leading white space."""
        self.calls = 0
        """Number of calls so far."""

    def push(self, text: str) -> list[Segment]:
        """Add text, and return the segments that have become final."""
        if self._format.is_plain:
            return [Text(text)] if text else []
        self._pending += text
        return list(self._advance(at_end=False))

    def finish(self) -> list[Segment]:
        """Return the withheld segments after the last text."""
        return list(self._advance(at_end=True))

    def _advance(self, *, at_end: bool) -> Iterator[Segment]:
        if self._state is _State.START:
            self._start(at_end=at_end)
        if self._state is _State.THINKING:
            yield from self._think(at_end=at_end)
        while self._state in (_State.TEXT, _State.CALL):
            before = self._state, len(self._pending)
            step = self._write if self._state is _State.TEXT else self._call
            yield from step(at_end=at_end)
            if (self._state, len(self._pending)) == before:
                return

    def _start(self, *, at_end: bool) -> None:
        text = self._pending.lstrip()
        if not self._format.has_thinking:
            self._state = _State.TEXT
        elif text.startswith(OPEN_THINKING):
            self._state, self._is_trimmed = _State.THINKING, True
            self._pending = text.removeprefix(OPEN_THINKING)
        elif at_end or not OPEN_THINKING.startswith(text):
            self._state = _State.TEXT

    def _think(self, *, at_end: bool) -> Iterator[Segment]:
        before, found, after = self._pending.partition(CLOSE_THINKING)
        if found:
            if text := self._trimmed(before).rstrip():
                yield Reasoning(text)
            self._state, self._pending, self._is_trimmed = _State.TEXT, after, True
        elif text := self._take(CLOSE_THINKING, at_end=at_end):
            yield Reasoning(text)

    def _write(self, *, at_end: bool) -> Iterator[Segment]:
        form = self._form
        if form is ToolForm.LLAMA:
            start = self._pending.lstrip()
            if start.startswith("{"):
                self._state = _State.CALL
            elif start:
                self._form = None  # only a whole message is a call
            if self._form is form and not at_end:
                return
        opening = form.value.opening if form else ""
        before, found, after = self._pending.partition(opening) if opening else ("", "", "")
        if found:
            if text := self._trimmed(before).rstrip():
                yield Text(text)
            self._state, self._pending = _State.CALL, after
            return
        if text := self._take(opening, at_end=at_end, trails=not form):
            yield Text(text)

    def _call(self, *, at_end: bool) -> Iterator[Segment]:
        form = self._form
        assert form is not None
        opening, closing = form.value
        block, found, after = self._pending.partition(closing) if closing else ("", "", "")
        if not (found or at_end):
            return
        if not closing:
            block, self._form = self._pending, None
        self._state, self._pending, self._is_trimmed = _State.TEXT, after, True
        if calls := read_calls(form, block, self._format.tools):
            for call in calls[: 1 - self.calls] if self._format.is_single else calls:
                yield replace(call, index=self.calls)
                self.calls += 1
        elif block:
            self._is_trimmed = False
            yield Text(f"{opening}{block}{found}")

    def _take(self, marker: str, *, at_end: bool, trails: bool = False) -> str:
        """Remove and return the pending text except a possible start of a marker, and white space before it."""
        text = self._trimmed(self._pending)
        end = len(text)
        if not at_end:
            end -= possible_start(text, [marker]) if marker else 0
            end = end if trails else len(text[:end].rstrip())
        self._pending = text[end:]
        return text[:end]

    def _trimmed(self, text: str) -> str:
        if self._is_trimmed:
            text = text.lstrip()
            self._is_trimmed = not text
        return text
