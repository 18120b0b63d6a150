"""Generator of `llms.txt`, the table of contents that language models read (https://llmstxt.org).

`make docs` writes it into the site, next to a copy of every page in Markdown.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
INDEX = "README.md"
ROW = re.compile(r"^\| ([^|]*\]\([^|]*) \| (.+) \|$", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s#]+)")


def llms_txt(nav: Sequence[Any]) -> str:
    """Return the file for the navigation of mkdocs.yml: a section for each of its parts, and a link for each page.

    A subject comes from the index of the pages. A page of the site that is made from the code has no file here,
    so its link leads to HTML.
    """
    summary = (DOCS.parent / INDEX).read_text(encoding="utf-8").split("\n\n")[1]
    lines = ["# cotrain", "", f"> {' '.join(summary.split())}", ""]
    subjects = dict(subject_by_page())
    for section, pages in parts(nav):
        lines += [f"## {section}", ""]
        lines += [entry(title, page, subjects.get(page, "")) for title, page in pages]
        lines.append("")
    return "\n".join(lines)


def parts(nav: Sequence[Any], section: str = "") -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each section of the navigation, and the titles and paths of its own pages."""
    pages, inner = [], []
    for each in nav:
        title, value = next(iter(each.items())) if isinstance(each, Mapping) else ("", each)
        if isinstance(value, list):
            inner.append((title, value))
        elif value != INDEX:
            pages.append((title, value))
    if pages:
        yield section, pages
    for title, value in inner:
        yield from parts(value, title)


def entry(title: str, page: str, subject: str) -> str:
    """Return the link to a page, with its subject if there is one."""
    file = DOCS / page
    if not file.is_file():
        page = f"{page.removesuffix('.md')}.html"
    elif not title:
        title = file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
    return f"- [{title}]({page})" + (f": {subject}" if subject else "")


def subject_by_page() -> Iterator[tuple[str, str]]:
    """Yield the paths of the pages in the index, and their subjects."""
    for cell, subject in ROW.findall((DOCS / INDEX).read_text(encoding="utf-8")):
        for _, page in LINK.findall(cell):
            yield posixpath.normpath(page), subject


def write(nav: Sequence[Any], site: Path) -> None:
    """Write the file and the copies of the pages into the folder of a built site."""
    (site / "llms.txt").write_text(llms_txt(nav), encoding="utf-8")
    for _, pages in parts(nav):
        for _, page in pages:
            if (DOCS / page).is_file():
                (site / page).write_bytes((DOCS / page).read_bytes())
