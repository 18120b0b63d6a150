"""The house speaks the field's words: one word per idea, and who acts is named."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("client", "scheduler", "server", "workers", "docs", "examples", "docker")
SUFFIXES = {".py", ".lua", ".md", ".toml", ".yaml", ".yml", ".sh", ".html", ".js"}

#: Not in code, comments, messages, logs or pages; beside each, what to say instead.
WORDS = {
    r"nobody|somebody|everybody|anybody|who(m|s)?ever|everybody's": "the client, another worker …",
    r"signs?\s+of\s+life": "heartbeat",
    r"(died|dies|die)\s+over": "crash",
    r"for\s+ever": "permanently",
    r"look(s|ed|ing)?\s+behind": "prefetch",
    r"riders?": "unnumbered op",
    r"heirs?|inheritance": "successor",
    r"suspect(s|ed)?|suspicions?|guilty": "bisection, the failing op",
    r"strangers?": "who could not be authenticated",
    r"debts?|owed|owes|owing": "replay backlog, unstored weights",
    r"tend|tends|tended": "maintain",
    r"recall(s|ed)?": "reload",
    r"lanes?": "send queue, copy stream",
    r"seats?": "adapter size",
    r"bites?": "head chunk",
    r"parked": "offloaded",
    r"beside": "next to; time sharing",
    r"meanwhile": "concurrently",
    r"by\s+(itself|themselves)": "alone",
    r"told|heard": "published, received, reported",
}
#: Not as a part of a name in code.
NAMES = frozenset(
    [
        "place",
        "places",
        "beat",
        "beats",
        "heart",
        "beside",
        "between",
        "ahead",
        "room",
        "held",
        "meet",
        "turn",
        "turns",
        "tell",
        "tells",
        "shift",
        "shifts",
        "seat",
        "seats",
        "park",
        "piece",
        "pieces",
        "stretch",
        "stretches",
        "pack",
        "packs",
        "packed",
        "lane",
        "lanes",
        "keeper",
        "debt",
        "away",
        "gone",
        "suspect",
        "suspects",
        "heir",
        "heirs",
        "rider",
        "riders",
        "guilty",
        "stranger",
        "died",
        "told",
        "heard",
        "said",
    ]
)
#: Names of stored keys and fields, which stay as they were written, and names that others chose.
KEPT = re.compile(r"""rider(s)?:|`rider:|:owed|'lane'|end_turn|spaces_between_special_tokens|\.(tell|pack)\b""")
_WORDS = re.compile(rf"(?<![\w-])({'|'.join(WORDS)})(?!\w)", re.IGNORECASE)
_EVENT = re.compile(r"""["']([a-z]+(?:_[a-z]+)+)["']""")
_PROSE = re.compile(r'"{3}.*?"{3}|(^ *|  )#.*?$', re.MULTILINE | re.DOTALL)
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def old_words(text: str) -> Iterator[str]:
    """Find words of the first list, with their lines."""
    text = KEPT.sub("", text)
    if not _WORDS.search(text):
        return
    for number, line in enumerate(text.splitlines(), 1):
        for found in _WORDS.finditer(line):
            yield f"{number}: {found[0]}"


def old_names(code: str) -> Iterator[str]:
    """Find names with a part of the second list: identifiers, and strings that look like events."""
    code = KEPT.sub("", code)
    if not any(part.lower() in NAMES for part in set(_PART.findall(_PROSE.sub("", code)))):
        return  # nothing to cut into names, which takes ten times as long
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        name = token.string if token.type == tokenize.NAME else ""
        if token.type == tokenize.STRING and (event := _EVENT.fullmatch(token.string)):
            name = event[1]
        if any(part.lower() in NAMES for part in _PART.findall(name)):
            yield f"{token.start[0]}: {name}"


@cache
def files() -> list[Path]:
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    pages = [*ROOT.glob("*.md"), ROOT / "Makefile"]
    return [
        path
        for path in [*inside, *pages]
        if (path.suffix in SUFFIXES or path.name == "Makefile")
        and path.name != "CHANGELOG.md"  # names what something was called
        and "_pb2" not in path.name
        and "vendor" not in path.parts  # other projects' files
    ]


def test_a_word_of_either_list_is_found() -> None:
    assert list(old_words("a heartbeat\nSomebody owes a sign of life")) == ["2: Somebody", "2: owes", "2: sign of life"]
    assert list(old_names('x = between\nlog("beat_lost")\nheartbeat = Placed()')) == ["1: between", "2: beat_lost"]


@pytest.mark.parametrize("folder", [*FOLDERS, "."])
def test_only_the_words_of_the_field_are_used(folder: str) -> None:
    found = []
    for path in files():
        own = path.relative_to(ROOT)
        if (own.parts[0] if len(own.parts) > 1 else ".") != folder:
            continue
        text = path.read_text()
        found += [f"{own}:{each}" for each in old_words(text)]
        if path.suffix == ".py":
            found += [f"{own}:{each}" for each in old_names(text)]
    assert found == []
