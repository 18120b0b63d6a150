"""Documentation pages: links with a target, and Python blocks that compile.

`tests/conformance/test_guide.py` runs that Python on a real server.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from cotrain import ServiceClient
from docs.llms import llms_txt, write
from tests.support.markdown import anchors, blocks, links
from tests.support.notebook import run_page

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
GUIDE = [page for page in PAGES if page.parent.name in ("get-started", "guide")]
CODE_PAGES = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
PATH = re.compile(r"`([\w./-]+\.(?:py|lua|sh|proto))\b[^`\n]*`")
FOLDER = re.compile(r"`((?:client|scheduler|server|workers|tests|bench|examples)/[\w./-]*/)`")
NOT_OURS = {"checkpoint.py", "upload_weights.py", "convert_hf_to_gguf.py"}
"""Files of the hosted SDKs' programs, and of llama.cpp."""


def test_every_link_has_a_target() -> None:
    dead = [(str(page), target) for page in PAGES for target in links(page) if not _leads_somewhere(page, target)]
    assert not dead


def test_every_file_and_folder_named_by_a_page_exists() -> None:
    missing = []
    for page in CODE_PAGES:
        text = page.read_text(encoding="utf-8")
        files = {path for path in PATH.findall(text) if path not in NOT_OURS | known_files()}
        folders = {folder for folder in FOLDER.findall(text) if not (ROOT / folder).is_dir()}
        missing += [(page.name, path) for path in files | folders]
    assert missing == []


def test_every_python_block_compiles() -> None:
    for page in PAGES:
        for block in blocks(page):
            block.compile()  # a SyntaxError names the page and the line


def test_no_page_has_the_marks_of_a_merge() -> None:
    mark = re.compile(r"^(<<<<<<<|>>>>>>>) ", re.MULTILINE)
    assert [page for page in CODE_PAGES if mark.search(page.read_text(encoding="utf-8"))] == []


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    named = {(index.parent / target.partition("#")[0]).resolve() for target in links(index)}
    unnamed = [page for page in PAGES if page.parent.name != "adr" and page not in named]
    assert [page for page in unnamed if page not in (index, ROOT / "README.md")] == []


def test_the_table_of_contents_for_language_models_describes_every_page(tmp_path: Path) -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    text = llms_txt(nav)
    assert text.startswith("# cotrain\n\n> A self-hosted server that")
    found = re.findall(r"^- \[(.+)\]\((.+\.(?:md|html))\)(: .+)?$", text, re.MULTILINE)
    assert len(found) == text.count("\n- ")
    pages = {page: subject for _, page, subject in found}
    made = {f"reference/{name}.html" for name in ("python-client", "commands", "openapi")}
    made.add("develop/modules.html")
    files = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.parent != ROOT}
    assert pages.keys() == made | files - {"README.md"}
    no_subject = {page for page, subject in pages.items() if not subject}
    assert no_subject == made | {page for page in files if page.startswith("adr/")}
    for page in files:
        (tmp_path / page).parent.mkdir(exist_ok=True)
    write(nav, tmp_path)
    assert {str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*.*")} == (files - {"README.md"} | {"llms.txt"})


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
def test_a_page_of_the_guide_is_short_and_begins_with_code(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 200
    assert any(line == "```python" for line in lines[:30])


def test_every_change_has_a_first_file() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 10
    for change, first, *_ in rows:
        assert (ROOT / PATH.findall(first)[0]).is_file(), change


def test_a_link_without_a_target_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Only\n[there](#only) [gone](#gone) [no file](other.md) `[no](link)`\n")
    dead = [target for target in links(page) if not _leads_somewhere(page, target)]
    assert dead == ["#gone", "other.md"]


def test_headings_of_the_same_name_get_different_anchors(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# What's `new`?\n## Again\n```\n# no heading\n```\n## Again\n")
    assert anchors(page) == {"whats-new", "again", "again-1"}


def test_blocks_have_their_lines_and_their_reason_not_to_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\na = 1\n```\n\n<!-- check\nassert a\n-->\n\n"
        "<!-- not run: needs a GPU -->\n```python\nb = 2\n```\n```sh\nls\n```\n"
    )
    assert [(each.line, each.source, each.reason_not_run) for each in blocks(page)] == [
        (2, "a = 1\n", None),
        (6, "assert a\n", None),
        (11, "b = 2\n", "needs a GPU"),
    ]


def test_blocks_share_names_and_may_await_and_a_check_can_fail(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nimport asyncio\nfound = [A]\n```\n"
        "```python\nawait asyncio.sleep(0)\nfound.append(2)\n```\n"
        "<!-- check\nassert found == [1, 2]\n-->\n"
    )
    run_page(page, {"A": "1"})
    with pytest.raises(AssertionError) as caught:
        run_page(page, {"A": "3"})
    assert (caught.traceback[-1].path, caught.traceback[-1].lineno + 1) == (page, 10)


def test_clients_that_a_page_leaves_open_are_closed_even_if_their_name_is_bound_again(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    block = '```python\nfrom cotrain import ServiceClient\n\nservice = ServiceClient("http://server", "tml-a")\n```\n'
    page.write_text(block * 2)
    with patch.object(ServiceClient, "close", autospec=True, side_effect=ServiceClient.close) as close:
        run_page(page, {})
    assert close.call_count == 2


@cache
def known_files() -> frozenset[str]:
    """Return every path of a file here, and every end of it, such as `worker/loop.py` and `loop.py`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    parts = [path.split("/") for path in listed.stdout.splitlines() if (ROOT / path).exists()]
    return frozenset("/".join(path[at:]) for path in parts for at in range(len(path)))


def _leads_somewhere(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    return file.exists() and (not anchor or anchor in anchors(file))
