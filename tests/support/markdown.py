"""Testable parts of a documentation page: Python blocks, links, anchors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

#: Python blocks ```python … ```, and hidden checks <!-- check … -->, which only tests need.
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]+) -->\n+)?"
    r"^(?:```python\n(?P<shown>.*?)^```$|<!-- check\n(?P<hidden>.*?)^-->$)",
    re.MULTILINE | re.DOTALL,
)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"!?\[(?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One block of Python on a page."""

    page: Path
    line: int
    """Line number on the page at which the block starts."""
    source: str
    reason_not_run: str | None

    def compile(self, replacements: Mapping[str, str] | None = None) -> CodeType:
        """Compile the block with the page and its line in tracebacks. `await` is allowed at the top level."""
        source = self.source
        for written, meant in (replacements or {}).items():
            source = source.replace(written, meant)
        code: CodeType = compile(
            "\n" * (self.line - 1) + source,
            str(self.page),
            "exec",
            flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
            dont_inherit=True,
        )
        return code


def blocks(page: Path) -> Iterator[Block]:
    """Yield the Python blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        kind = "shown" if found["shown"] is not None else "hidden"
        line = text.count("\n", 0, found.start(kind)) + 1
        yield Block(page, line, found[kind], found["reason"])


def links(page: Path) -> list[str]:
    """Return the targets of a page's links and pictures, without those to other sites."""
    targets: list[str] = LINK.findall(_prose(page))
    return [target for target in targets if "://" not in target]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub derives them from headings."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        words = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        again = sum(1 for anchor in found if re.fullmatch(rf"{re.escape(words)}(-\d+)?", anchor))
        found.add(f"{words}-{again}" if again else words)
    return found


def _prose(page: Path) -> str:
    return INLINE_CODE.sub("", FENCED.sub("", page.read_text(encoding="utf-8")))
