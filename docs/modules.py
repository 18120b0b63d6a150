"""Generator of the page of modules, from docstrings and imports.

`make docs` adds it to the site. `.venv/bin/python docs/modules.py` prints it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from itertools import permutations
from pathlib import Path

import grimp

Edge = tuple[str, str]

ROOT = Path(__file__).resolve().parents[1]
INTRODUCTION = """\
# Modules

Every folder and file of the product. An arrow leads from a folder to those that it imports, without arrows that others imply. The
directions are contracts in `pyproject.toml`. [Architecture](architecture.md) describes the way of a request through the modules.
"""

PACKAGES = {
    "client/cotrain": "cotrain",
    "scheduler/cotrain_store": "cotrain_store",
    "scheduler/cotrain_scheduler": "cotrain_scheduler",
    "server/cotrain_server": "cotrain_server",
    "workers/cotrain_workers": "cotrain_workers",
}
OWN_SECTION = ("workers/cotrain_workers/engine",)
"""Packages with subpackages that have their own table and picture."""


def modules_page() -> str:
    """Return the page. The packages must be importable."""
    graph = grimp.build_graph(*PACKAGES.values(), cache_dir=None)
    sections = (_section(graph, folder) for folder in [*PACKAGES, *OWN_SECTION])
    return "\n".join([INTRODUCTION, *sections])


def code_folders() -> Iterator[Path]:
    """Yield every folder of product code: the five packages and all of their subpackages."""
    for package in PACKAGES:
        for init in sorted((ROOT / package).rglob("__init__.py")):
            yield init.parent


def docstring(file: Path) -> str:
    """Return a file's docstring; empty if it has none."""
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""


def _section(graph: grimp.ImportGraph, folder: str) -> str:
    folders = sorted(path for path in (ROOT / folder).iterdir() if (path / "__init__.py").exists())
    names = [path.name for path in folders]
    imports: dict[str, list[str]] = {}
    for a, b in direct(_edges(graph, _module(folder), names)):
        imports.setdefault(a, []).append(b)
    return "\n".join(
        [
            f"## `{folder}/`",
            "",
            _what_it_knows(ROOT / folder / "__init__.py"),
            "",
            "| path | contents |",
            "|---|---|",
            *(row for path in folders for row in _rows(path, folder, imports.get(path.name, []))),
            *(_row(file.name, file) for file in sorted((ROOT / folder).glob("[!_]*.py"))),
            "",
        ]
    )


def _rows(path: Path, folder: str, imports: Sequence[str] = ()) -> Iterator[str]:
    """Yield the row of a package and of its subpackages, unless these have their own section."""
    yield _row(f"{path.relative_to(ROOT / folder)}/", path / "__init__.py", imports)
    if str(path.relative_to(ROOT)) not in OWN_SECTION:
        for inner in sorted(path.glob("*/__init__.py")):
            yield from _rows(inner.parent, folder)


def _row(name: str, described_in: Path, imports: Sequence[str] = ()) -> str:
    arrow = f" → {', '.join(imports)}" if imports else ""
    return f"| `{name}`{arrow} | {_what_it_knows(described_in)} |"


def _what_it_knows(file: Path) -> str:
    first, _, _ = docstring(file).partition("\n\n")
    sentence, _, _ = " ".join(first.split()).partition(". ")
    return f"{sentence.removesuffix('.')}.".replace("|", "\\|")


def _module(folder: str) -> str:
    return ".".join(Path(folder).parts[1:])


def _edges(graph: grimp.ImportGraph, package: str, folders: list[str]) -> set[Edge]:
    return {
        (a, b)
        for a, b in permutations(folders, 2)
        if graph.direct_import_exists(importer=f"{package}.{a}", imported=f"{package}.{b}", as_packages=True)
    }


def direct(edges: set[Edge]) -> list[Edge]:
    """Return the edges without those implied by a chain of others. A cycle keeps all of its edges."""
    reached = _reached(edges)

    def is_implied(a: str, b: str) -> bool:
        through = (c for c in reached[a] & {x for x, seen in reached.items() if b in seen})
        return any(c not in (a, b) and a not in reached[c] and c not in reached[b] for c in through)

    return sorted((a, b) for a, b in edges if not is_implied(a, b))


def _reached(edges: set[Edge]) -> dict[str, set[str]]:
    """Return the packages reachable from each package."""
    reached = {a: {b for x, b in edges if x == a} for a in {a for edge in edges for a in edge}}
    for _ in reached:
        for seen in reached.values():
            seen |= {further for b in seen for further in reached[b]}
    return reached


def main() -> None:
    """Print the page."""
    sys.path[:0] = [str((ROOT / folder).parent) for folder in PACKAGES]
    sys.stdout.write(modules_page())


if __name__ == "__main__":
    main()
