"""Every folder of code is a room: small, and described in a line."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp

from docs import modules

MAX_FILES = 20
BENCHES = {file.parent for file in (modules.ROOT / "bench").rglob("*.py")}
FOLDERS = sorted({*modules.code_folders(), *BENCHES})


def test_the_page_of_modules_lists_every_file_outside_subfolders_and_arrows() -> None:
    page = modules.modules_page()
    assert "| `scheduler.py` | Scheduler process: " in page
    assert "\n| `transport/` → wire | HTTP transport " in page
    for package in modules.PACKAGES:
        assert f"\n## `{package}/`\n" in page


def test_a_folder_has_few_files() -> None:
    for folder in FOLDERS:
        assert len(list(folder.glob("*.py"))) <= MAX_FILES, folder


def test_a_folder_is_described_in_one_line() -> None:
    for folder in FOLDERS:
        first, *rest = modules.docstring(folder / "__init__.py").splitlines() or [""]
        assert first.endswith("."), f"{folder}: the first line is a sentence"
        assert not any(rest[:1]), f"{folder}: the second line is empty"


def test_no_files_import_one_another_in_a_circle() -> None:
    graph = grimp.build_graph(*modules.PACKAGES.values(), cache_dir=None)
    TopologicalSorter(
        {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    ).prepare()  # else a CycleError, which names them


def test_an_arrow_that_others_imply_is_left_out() -> None:
    edges = {("a", "b"), ("b", "c"), ("a", "c"), ("a", "d")}
    assert modules.direct(edges) == [("a", "b"), ("a", "d"), ("b", "c")]


def test_a_circle_keeps_its_arrows() -> None:
    edges = {("a", "b"), ("b", "a"), ("b", "c"), ("a", "c")}
    assert modules.direct(edges) == sorted(edges)
