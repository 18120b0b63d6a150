"""Rules of docs/develop/style.md that a program can check, for docstrings, comments and pages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("client", "scheduler", "server", "workers", "bench", "examples", "docs", "tests")
MAX_WORDS = 30

CLAUSE = re.compile(r"(What|Whether|Who|Whose|Which|How|Where|When|Of|As|All)\b")
NOT_WHAT_THE_CALLER_GETS = re.compile(r"(Say|Tell|Give|Take|Have|Let|Note|Look|Name)\b")
DIALECT = re.compile(
    r"\bwhat (is|was|has|of|it|one|a|the)\b|\bso (many|much|long)\b|\bshall\b|\bthat (is|are) there\b"
    r"|\bnow and then\b|\bno more\b|\bas far as\b",
    re.IGNORECASE,
)
CODE_SPAN = re.compile(r"``?[^`\n]+``?|https?://\S+")
FENCE = re.compile(r"^```.*?^```|<!--.*?-->", re.MULTILINE | re.DOTALL)
#: Behind code, or alone on its line; a `#` in a string has no two blanks in front.
COMMENT = re.compile(r"(?:^\s*|(?<=\S)\s{2})#:? (.*)$")
#: Scripts, settings and charts, without their examples, which are indented.
SCRIPTS = (
    "docker/**/*.sh", "docker/**/*.yml", "docker/**/*.conf", "docker-compose*.yml", "Dockerfile",
    "deploy/**/*.yaml", "deploy/**/*.tpl", "client/**/*.sh", "scheduler/**/*.lua", "pins/*.sh", ".ci/run",
    "Makefile", "pyproject.toml", "mkdocs.yml", ".pre-commit-config.yaml",
)  # fmt: skip
SCRIPT_COMMENT = re.compile(
    r"(?:^\s*|(?<=\S)\s{1,2})# (?!  )(.*)$|\{\{- /\* (.*) \*/|(?:^\s*|(?<=\S) )-- (?!needs: )(.*)$"
)
#: Every string that may be a docstring: with three quotes, or alone on its line.
STRING = re.compile(r'"{3}.*?"{3}|^ *"[^"\n]+"$', re.MULTILINE | re.DOTALL)
OPENING = re.compile("#|--|/[*]")
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z*`\"(])|\n\s*\n|\n\s*[*\-#|\d>]")


@cache
def faults(path: Path) -> list[str]:
    """Return the rules that a file breaks, each with its line."""
    text = path.read_text(encoding="utf-8")
    match path.suffix:
        case ".md":
            found = list(_of_page(text))
        case ".py":
            found = [*_of_docstrings(text), *_of_comments(text, COMMENT)]
        case _:
            found = list(_of_comments(text, SCRIPT_COMMENT))
    return [f"{path.relative_to(ROOT)}:{line}: {fault}" for line, fault in found]


def faults_of_prose(prose: str) -> Iterator[str]:
    """Yield words of the dialect, and sentences above MAX_WORDS words."""
    prose = CODE_SPAN.sub("code", prose)
    for match in DIALECT.finditer(prose):
        yield f"“{match[0]}”"
    for sentence in SENTENCE_END.split(prose):
        words = len(sentence.split())
        if words > MAX_WORDS:
            yield f"a sentence of {words} words: {' '.join(sentence.split()[:6])} …"


def _of_page(text: str) -> Iterator[tuple[int, str]]:
    prose = FENCE.sub(lambda code: "\n" * code[0].count("\n"), text)
    for number, block in _blocks(prose):
        cells = block.split("|") if block.lstrip().startswith("|") else [block]
        for cell in cells:
            for fault in faults_of_prose(cell):
                yield number, fault


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """Split a page into paragraphs, list items and table rows, each with its first line."""
    start, lines = 1, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if lines and (not line.strip() or re.match(r"\s*([*\-#|>]|\d+\.) ?", line)):
            yield start, "\n".join(lines)
            lines = []
        if not lines:
            start = number
        if line.strip():
            lines.append(line)
    if lines:
        yield start, "\n".join(lines)


def _of_docstrings(text: str) -> Iterator[tuple[int, str]]:
    if not any(map(_may_have_fault, STRING.findall(text))):
        return  # nothing to parse, which takes ten times as long
    module = ast.parse(text)
    for node in (module, *_statements(module)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            line = getattr(node, "lineno", 1)
            if doc is None:
                continue
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            opening = CLAUSE.match(doc) or (is_function and NOT_WHAT_THE_CALLER_GETS.match(doc))
            if opening:
                yield line, f"opens with “{opening[0]}”"
            for _, block in _blocks(doc):
                for fault in faults_of_prose(block):
                    yield line, fault
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            for fault in faults_of_prose(str(node.value.value)):
                if fault.startswith("“"):  # docstrings above have these already, but not attributes
                    yield node.lineno, fault


def _may_have_fault(string: str) -> bool:
    string = string.strip('"\n ')
    opening = CLAUSE.match(string) or NOT_WHAT_THE_CALLER_GETS.match(string)
    return bool(opening) or any(any(faults_of_prose(block)) for _, block in _blocks(string))


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements inside a node. A walk over its expressions as well takes ten times as long."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, name, ()):
            yield inner
            if not isinstance(inner, ast.Expr):
                yield from _statements(inner)


def _of_comments(text: str, comment: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """Yield faults of comments. Consecutive lines without code are one text."""
    start, lines = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        found = comment.search(line) if OPENING.search(line) else None  # a fast look first
        if lines and (not found or found.start() > 0):
            for fault in faults_of_prose(" ".join(lines)):
                yield start, fault
            lines = []
        if found:
            start = start if lines else number
            lines.append(next(filter(None, found.groups()), ""))


@cache
def files() -> list[Path]:
    """Return every page, Python file, script and chart that is written here."""
    code = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    scripts = [path for pattern in SCRIPTS for path in ROOT.glob(pattern)]
    generated = {"compatibility.md", "style.md"}  # the second quotes what it forbids
    return sorted(
        path
        for path in [*code, *pages, *scripts]
        if "_pb2" not in path.name and path.name not in generated and path != Path(__file__)
    )


def test_a_clause_a_word_of_the_dialect_and_a_long_sentence_are_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""What a worker counts."""\n\n\ndef f() -> None:\n    """Say so many things."""\n'
        "    # and this shall be found, " + "word " * 30 + "\n"
    )
    text = module.read_text()
    found = [fault for _, fault in (*_of_docstrings(text), *_of_comments(text, COMMENT))]
    assert {"opens with “What”", "opens with “Say”", "“so many”", "“shall”"} <= set(found)
    assert any("a sentence of" in fault for fault in found)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("start.sh", "# this shall be found"),
        ("values.yaml", "port: 1  # what is reached"),
        ("_helpers.tpl", "{{- /* this shall be found */ -}}"),
        ("script.lua", "local a = 1 -- so many things"),
    ],
)
def test_comments_of_scripts_and_charts_are_checked(tmp_path: Path, name: str, line: str) -> None:
    script = tmp_path / name
    script.write_text(f"{line}\n#   so many examples\n")
    assert len(list(_of_comments(script.read_text(), SCRIPT_COMMENT))) == 1


@pytest.mark.parametrize("folder", [*CODE, "docker", "deploy", "pins", ".ci", "."])
def test_every_file_keeps_the_rules(folder: str) -> None:
    found = []
    for path in files():
        own = path.relative_to(ROOT)
        if (own.parts[0] if len(own.parts) > 1 else ".") == folder:
            found += faults(path)
    assert found == []
