"""Whether the newest token ends a generation: stop tokens, and one automaton for all stop strings."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from cotrain_workers.engine.decoding.requests import SampleRequest, TextOf

#: What an unfinished character, or bytes that are none, become.
REPLACEMENT = "\ufffd"
#: Tokens whose text is waited for: more of them are no unfinished character.
MAX_PENDING = 16
#: A character has at most so many bytes, and so many tokens.
CHARACTER_TOKENS = 4
#: The last tokens of a prompt, of which as few as possible are decoded along with what follows.
PROMPT_TOKENS = 8


class StopStrings:
    """Finds the end of any of some strings (Aho-Corasick): a character costs as much for many as for one.

    Nodes are numbered so that a string is a chain of neighbours; only where two strings part is there
    anything to look up. A node takes about ten bytes.
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
        self._shorter = array("I", bytes(4 * len(ends)))  # the longest other prefix that ends here
        for node in sorted(range(1, len(ends)), key=depths.__getitem__):
            if depths[node] > 1:
                parent = self._parents[node]
                self._shorter[node] = self._after(self._shorter[parent], self._labels[node])
            ends[node] |= ends[self._shorter[node]]

    def advance(self, node: int, text: str) -> tuple[int, bool]:
        """Read `text` from `node` on (0: the beginning); return where it leads, and whether a string ended."""
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
        if (
            following < len(self._parents)
            and self._parents[following] == node
            and self._labels[following] == character
        ):
            return following
        return self._branches.get((node, character))


@lru_cache(maxsize=64)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """Return the automaton of some strings: the requests of a client mostly have the same."""
    return StopStrings(stops)


@dataclass
class ReadText:
    """How far the text of a sequence was read. Survives preemption, as the tokens do."""

    node: int = 0
    context: list[int] = field(default_factory=list)
    """Read, and decoded along with what follows: some tokenizers drop a space before their first token."""
    pending: list[int] = field(default_factory=list)
    """Not read yet: they end inside a character, or have no text."""
    is_behind_prompt: bool = False


def has_stopped(token: int, request: SampleRequest, read: ReadText, text_of: TextOf | None) -> bool:
    """Return whether a sequence's next token ends it. Call it once for every token, in order."""
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
    """Return the last tokens of a prompt to read a text behind: some tokenizers drop a first space."""
    counts = range(1, len(prompt) + 1)
    # Part of a character would spoil the bytes that follow.
    return next((list(prompt[-n:]) for n in counts if REPLACEMENT not in text_of(prompt[-n:])), [])


def has_stop_string(token: int, stops: StopStrings, read: ReadText, text_of: TextOf) -> bool:
    """Return whether a stop string ends with the text of the next token; reads on if not.

    A character counts once all its bytes are there; then only it and the tokens just before it are decoded.
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
    elif len(read.pending) > MAX_PENDING:  # bytes that are no text
        count = len(read.pending) - CHARACTER_TOKENS
        text = text_of(read.context + read.pending[:count])
        node, _ = stops.advance(read.node, text[known:])
        _go_on(read, node, count, has_text=len(text) > known)
    return False


def _whole_character(tokens: Sequence[int], text_of: TextOf) -> int:
    """Count the last tokens that are one character alone; 0 for none.

    Where bytes are tokens, a byte that is no character spoils the text of all its neighbours.
    """
    counts = range(2, min(CHARACTER_TOKENS, len(tokens) - 1) + 1)
    return next((n for n in counts if REPLACEMENT not in text_of(tokens[-n:])), 0)


def _go_on(read: ReadText, node: int, count: int, *, has_text: bool) -> None:
    """Note that the first `count` pending tokens were read, up to `node`."""
    if has_text:
        read.context = read.pending[:count]
    read.pending = read.pending[count:]
    read.node = node
