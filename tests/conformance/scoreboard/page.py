"""Render the measured rows as docs/reference/compatibility.md, and read its rows back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Any

from tests.conformance.scoreboard.marks import ABSENT, FAILED, NOT_TRIED, REFUSED, SUPPORTED

HistoryEntries = dict[str, Any]
"""Output of `walk`: the version, its rows, and the arguments that no row passes."""

INTRODUCTION = """\
# Compatibility with the published SDKs

Each published version of the `tinker` SDK runs unmodified. `make compatibility` wrote this page on {day}; do not edit it. Each version
calls every public method, property and command with real arguments, on a server with a tiny model.

| text | meaning |
|---|---|
| yes | the call did its work |
| no (1) | the call was refused, for [reason](#reasons) 1 |
| fails (1) | any other fault |
| not tried | no check exists |
| empty cell | not in this version |

`name[_async]` are two methods with the same result. `…(option)` behind a method is an option of it with an effect of its own.
"""
MARKS = {SUPPORTED: "yes", NOT_TRIED: "not tried", ABSENT: ""}
COMMANDS = "The command line"
TWIN = "[_async]"
SAME = "…"
TITLE = re.compile(r"^## (?P<title>.+)$")
FUTURE = re.compile(r"^Backcompat(?P<client>\w+)Future$")
AS_CLIENT = re.compile(r"^Every member of `(?P<client>\w+)` in [\d.]+ has the same result here\.")
ROW = re.compile(r"^\| (?P<names>`[^|]+`) \|(?P<cells>.*)\|$")
SDK_WORDS = re.compile(r"^(?:Request failed: )?(.*?)(?: for self\.request_id=.*)$", re.DOTALL)
DICTIONARY = re.compile(r"\{'detail'.*?\}")
# Errors of an SDK that look like the server's, with their explanations.
FAULTS: Mapping[str, str] = {
    "called from incorrect event loop": "a fault of these SDK versions: the method uses their"
    " client from the caller's event loop",
    "Got unexpected extra argument": "a fault of this SDK version: its command `list` hides Python's `list`",
}
# Parts that differ between runs of the same walk.
PASSING: Mapping[str, str] = {
    r"http://127\.0\.0\.1:\d+": "<server>",
    r"/tmp/\S+": "<folder>",
    r"\b[0-9a-f-]{16,}(:train:\d+|:sample:\d+)?": "<id>",
    r"saved-\d+": "<name>",
}


def render(founds: Sequence[HistoryEntries], day: date) -> str:
    """Render the whole page. The same results produce the same text."""
    versions = [found["version"] for found in founds]
    sections = [INTRODUCTION.format(day=day.isoformat()), _counts(founds)]
    reasons: list[str] = []
    for owner in _owners(founds):
        sections.append("\n".join(_section(owner, founds, versions, reasons)))
    if reasons:
        numbered = (f"{number}. {words}" for number, words in enumerate(reasons, start=1))
        sections.append("\n".join(["## Reasons\n", *numbered, ""]))
    sections.append("\n".join(_unpassed(founds)))
    return "\n".join(sections)


def read(page: str) -> dict[str, list[str]]:
    """Return the cells of every member, by its name, one cell per version."""
    found: dict[str, list[str]] = {}
    prefix = ""
    as_client: dict[str, str] = {}
    for line in page.splitlines():
        if title := TITLE.match(line):
            prefix = "tinker " if title["title"] == COMMANDS else f"{title['title']}."
        elif same := AS_CLIENT.match(line):
            as_client[prefix] = f"{same['client']}."
        elif row := ROW.match(line):
            cells = [cell.strip() for cell in row["cells"].split("|")]
            last = ""
            for written in re.findall(r"`([^`]+)`", row["names"]):
                name = written.replace(SAME, last, 1) if written.startswith(SAME) else written
                last = name.partition("(")[0].removesuffix(TWIN)
                both = (name.removesuffix(TWIN), name.replace(TWIN, "_async"))
                found |= dict.fromkeys((prefix + each for each in both), cells)
    for prefix, client in as_client.items():
        for name, cells in list(found.items()):
            if name.startswith(client) and cells[-1]:
                found.setdefault(prefix + name.removeprefix(client), [""] * (len(cells) - 1) + cells[-1:])
    return found


def reason(words: str) -> str:
    """Return the reproducible part of a reason, and for an HTTP answer only its message."""
    words = SDK_WORDS.sub(r"\1", DICTIONARY.sub(_detail, words))
    words = re.sub(r"Error code: \d+ - ", "", words)
    for pattern, name in PASSING.items():
        words = re.sub(pattern, name, words)
    fault = next((f" ({what})" for sign, what in FAULTS.items() if sign in words), "")
    return " ".join(words.split()).replace("|", "\\|") + fault


def _detail(match: re.Match[str]) -> str:
    try:
        return str(ast.literal_eval(match[0])["detail"])
    except (ValueError, SyntaxError):
        return match[0]


def _owners(founds: Sequence[HistoryEntries]) -> list[str]:
    names = {_owner(name) for found in founds for name in found["rows"]}
    return sorted(names, key=lambda name: (name == "tinker", name == "auth", name))


def _owner(row: str) -> str:
    return "tinker" if row.startswith("tinker ") else row.partition(".")[0]


def _counts(founds: Sequence[HistoryEntries]) -> str:
    lines = ["| SDK | yes | no | fails | not tried |", "|---|--:|--:|--:|--:|"]
    for found in founds:
        outcomes = [outcome for outcome, _ in found["rows"].values()]
        counts = [outcomes.count(each) for each in (SUPPORTED, REFUSED, FAILED, NOT_TRIED)]
        lines.append(f"| {found['version']} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join([*lines, ""])


def _section(
    owner: str, founds: Sequence[HistoryEntries], versions: Sequence[str], reasons: list[str]
) -> Iterator[str]:
    yield f"## {COMMANDS if owner == 'tinker' else owner}\n"
    names = sorted({name for found in founds for name in found["rows"] if _owner(name) == owner})
    if client := _client_of(owner, founds):
        names = [name for name in names if name.replace(owner, client, 1) not in founds[-1]["rows"]]
        yield f"Every member of `{client}` in {versions[-1]} has the same result here.\n"
    yield "| | " + " | ".join(versions) + " |"
    yield "|---|" + ":-:|" * len(versions)
    members: dict[str, list[str]] = {}
    for name in names:
        cells = [_cell(found["rows"].get(name, (ABSENT, "")), reasons) for found in founds]
        if any(cells):
            members.setdefault(" | ".join(cells), []).append(name[len(owner) + 1 :])
    for outcomes in sorted(members, key=lambda each: "(" not in each):  # those with a reason first
        yield f"| {', '.join(_twins(members[outcomes]))} | {outcomes} |"
    yield ""


def _client_of(owner: str, founds: Sequence[HistoryEntries]) -> str | None:
    """Return the client class whose members of the newest version a future of that version has, with the same results."""
    future = FUTURE.match(owner)
    if future is None or any(_owner(name) == owner for each in founds[:-1] for name in each["rows"]):
        return None
    rows = founds[-1]["rows"]
    prefix = f"{future['client']}."
    members = [name for name in rows if name.startswith(prefix)]
    is_same = all(_result(rows, name) == _result(rows, f"{owner}.{name.removeprefix(prefix)}") for name in members)
    return future["client"] if members and is_same else None


def _result(rows: Mapping[str, tuple[str, str]], name: str) -> tuple[str, str]:
    """Return the outcome of a row, and its reason without ids."""
    what, words = rows.get(name, (ABSENT, ""))
    return what, reason(words)


def _twins(names: Sequence[str]) -> Iterator[str]:
    last = ""
    for name in names:
        if name.endswith("_async") and name.removesuffix("_async") in names:
            continue
        method, _, option = name.partition("(")
        written = f"{SAME}({option}" if option and method == last else name
        last = method
        yield f"`{written}{TWIN if f'{name}_async' in names else ''}`"


def _cell(outcome: Sequence[str], reasons: list[str]) -> str:
    what, words = outcome
    if what in MARKS:
        return MARKS[what]
    if reason(words) not in reasons:
        reasons.append(reason(words))
    number = reasons.index(reason(words)) + 1
    return f"no ({number})" if what == REFUSED else f"fails ({number})"


def _unpassed(founds: Sequence[HistoryEntries]) -> Iterator[str]:
    """List the parameters of the newest version's methods that no row has passed."""
    newest = founds[-1]
    yield "## Arguments that no row passes\n"
    if not newest["unpassed"]:
        yield f"None: every argument of every method of {newest['version']} is passed by some row."
    for name, arguments in sorted(newest["unpassed"].items()):
        yield f"* `{name}`: " + ", ".join(f"`{each}`" for each in arguments)
    yield ""
