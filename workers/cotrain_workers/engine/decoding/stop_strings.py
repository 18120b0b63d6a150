"""Stop conditions of a sequence: stop tokens, and one automaton for all stop strings."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from cotrain_workers.engine.decoding.requests import SampleRequest, TextOf

#: Replacement of an incomplete character or of invalid bytes.
REPLACEMENT = "\ufffd"
#: Maximum number of tokens held back as an incomplete character.
MAX_PENDING = 16
#: Maximum number of bytes of a character, and so of its tokens.
CHARACTER_TOKENS = 4
#: Number of last prompt tokens of which as few as possible are decoded together with the following text.
PROMPT_TOKENS = 8


class StopStrings:
    """Aho-Corasick automaton of stop strings; the cost per character does not depend on their number.

    Nodes are numbered so that a string is a chain of consecutive numbers. Only branches need a lookup. A node
    takes about ten bytes.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._branches: dict[tuple[int, str], int] = {}
        self._parents = array("I", [0])
        labels, depths, ends = [""], array("I", [0]), bytearray(1)
        self._labels: Sequence[str] = labels
        for stop in stops:
            node = 0
            for character in stop:
                child = self._child(node, character)
                if child is None:
                    child = len(labels)
                    if child != node + 1:
                        self._branches[node, character] = child
                    labels.append(character)
                    self._parents.append(node)
                    depths.append(depths[node] + 1)
                    ends.append(0)
                node = child
            ends[node] = 1
        self._labels, self._ends = "\0" + "".join(labels), ends
        self._shorter = array("I", bytes(4 * len(ends)))  # longest proper suffix that is a node
        for node in sorted(range(1, len(ends)), key=depths.__getitem__):
            if depths[node] > 1:
                parent = self._parents[node]
                self._shorter[node] = self._after(self._shorter[parent], self._labels[node])
            ends[node] |= ends[self._shorter[node]]

    def advance(self, node: int, text: str) -> tuple[int, bool]:
        """Read `text` from `node` (0 is the start); return the next node and True if a string ended."""
        for character in text:
            node = self._after(node, character)
            if self._ends[node]:
                return node, True
        return node, False

    def _after(self, node: int, character: str) -> int:
        while (child := self._child(node, character)) is None and node:
            node = self._shorter[node]
        return child or 0

    def _child(self, node: int, character: str) -> int | None:
        following = node + 1
        if following < len(self._parents) and self._parents[following] == node and self._labels[following] == character:
            return following
        return self._branches.get((node, character))


@lru_cache(maxsize=64)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """Return the cached automaton of some strings; requests of a client usually share them."""
    return StopStrings(stops)


@dataclass
class ReadText:
    """Position of the text matcher in a sequence. Survives preemption, like the tokens."""

    node: int = 0
    context: list[int] = field(default_factory=list)
    """Tokens already read and decoded again with the next ones: some tokenizers drop a leading space."""
    pending: list[int] = field(default_factory=list)
    """Tokens not read yet: they end inside a character, or have no text."""
    is_behind_prompt: bool = False


def has_stopped(token: int, request: SampleRequest, read: ReadText, text_of: TextOf | None) -> bool:
    """Return True if the next token ends a sequence. The caller must pass every token once, in order."""
    if token in request.stop_tokens:
        return True
    if not request.stop_strings:
        return False
    assert text_of is not None
    if not read.is_behind_prompt:
        read.is_behind_prompt = True
        read.context = prompt_end(request.prompt[-PROMPT_TOKENS:].tolist(), text_of)
    return has_stop_string(token, stop_strings(request.stop_strings), read, text_of)


def prompt_end(prompt: Sequence[int], text_of: TextOf) -> list[int]:
    """Return the last prompt tokens as decoding context, because some tokenizers drop a leading space."""
    counts = range(1, len(prompt) + 1)
    # A partial character would corrupt the bytes that follow.
    return next((list(prompt[-n:]) for n in counts if REPLACEMENT not in text_of(prompt[-n:])), [])


def has_stop_string(token: int, stops: StopStrings, read: ReadText, text_of: TextOf) -> bool:
    """Return True if a stop string ends in the text of the next token; otherwise advance the matcher.

    A character counts once its bytes are complete. Only it and the tokens just before it are decoded then.
    """
    read.pending.append(token)
    known = len(text_of(read.context)) if read.context else 0
    text = text_of(read.context + read.pending)
    node, is_found = stops.advance(read.node, text[known:])
    if is_found:
        return True
    if not text.endswith(REPLACEMENT):
        _go_on(read, node, len(read.pending), has_text=len(text) > known)
    elif whole := _whole_character(read.pending, text_of):
        text = text_of(read.context + read.pending[:-whole])
        node, is_stopped = stops.advance(read.node, text[known:])
        node, is_found = stops.advance(node, text_of(read.pending[-whole:]))
        _go_on(read, node, len(read.pending), has_text=True)
        read.context = read.context[-whole:]
        return is_stopped or is_found
    elif len(read.pending) > MAX_PENDING:  # invalid bytes
        count = len(read.pending) - CHARACTER_TOKENS
        text = text_of(read.context + read.pending[:count])
        node, _ = stops.advance(read.node, text[known:])
        _go_on(read, node, count, has_text=len(text) > known)
    return False


def _whole_character(tokens: Sequence[int], text_of: TextOf) -> int:
    """Return the number of last tokens that form exactly one character, or 0.

    With byte tokens, an invalid byte corrupts the text of all adjacent tokens.
    """
    counts = range(2, min(CHARACTER_TOKENS, len(tokens) - 1) + 1)
    return next((n for n in counts if REPLACEMENT not in text_of(tokens[-n:])), 0)


def _go_on(read: ReadText, node: int, count: int, *, has_text: bool) -> None:
    """Record that the first `count` pending tokens were read, up to `node`."""
    if has_text:
        read.context = read.pending[:count]
    read.pending = read.pending[count:]
    read.node = node
