"""Completeness of the compatibility page, and correctness of the walk that measures it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tinker

from tests.conformance.programs.__main__ import PROGRAMS
from tests.conformance.running import ROOT, Server
from tests.conformance.scoreboard import surface
from tests.conformance.scoreboard.__main__ import INSTALLED, PAGE, VERSIONS, walk
from tests.conformance.scoreboard.calls import Call, NotOffered, UnexpectedAnswer, judge, parameters, perform
from tests.conformance.scoreboard.marks import ABSENT, FAILED, NOT_TRIED, REFUSED, SUPPORTED
from tests.conformance.scoreboard.page import read, reason, render
from tests.conformance.scoreboard.walk import rows

TODAY = date(2026, 1, 2)

# ---- The page ------------------------------------------------------------------------------------


def test_the_page_has_a_row_for_every_member_of_the_installed_sdk() -> None:
    listed = read(PAGE.read_text())
    offered = {f"{owner}.{name}" for owner, names in surface.members().items() for name in names}
    offered |= {f"tinker {name}" for name in surface.commands()}
    newest = VERSIONS.index(INSTALLED)
    assert offered <= {row for row, cells in listed.items() if cells[newest]}


def test_every_cell_of_the_page_is_a_yes_or_has_a_reason() -> None:
    page = PAGE.read_text()
    reasons = dict(re.findall(r"^(\d+)\. (\S.*)$", page, re.MULTILINE))
    for row, cells in read(page).items():
        assert len(cells) == len(VERSIONS)
        for cell in cells:
            if cell not in ("yes", ""):
                because = re.fullmatch(r"(no|fails) \((\d+)\)", cell)
                assert because, cell
                assert because[1] == "no" or "a fault of" in reasons[because[2]], row


def test_the_page_has_the_uses_of_each_program() -> None:
    page = PAGE.read_text()
    assert all(f"\n| {program} | " in page for program in PROGRAMS)


def test_every_version_of_the_page_is_pinned_or_installed() -> None:
    fetched = re.findall(r"tinker==([\d.]+)", (ROOT / "tests/conformance/sdks.sh").read_text())
    assert {*fetched, version("tinker")} == set(VERSIONS)


def test_rendering_is_deterministic_and_reasons_are_shared() -> None:
    results = {
        "A.a": (SUPPORTED, ""),
        "A.b": (REFUSED, "Not here."),
        "A.c": (REFUSED, "Not here."),
        "A.d": (NOT_TRIED, ""),
        "A.e": (ABSENT, ""),
    }
    backwards = dict(reversed(results.items()))
    page = render([found("1.0", results), found("2.0", {"A.a": (FAILED, "Fell over.")})], TODAY)
    assert page == render([found("1.0", backwards), found("2.0", {"A.a": (FAILED, "Fell over.")})], TODAY)
    assert read(page) == {
        "A.a": ["yes", "fails (1)"],
        "A.b": ["no (2)", ""],
        "A.c": ["no (2)", ""],
        "A.d": ["not tried", ""],
    }
    assert "1. Fell over.\n2. Not here.\n" in page
    assert "| 1.0 | 1 | 2 | 0 | 1 |" in page


def test_a_future_with_the_results_of_its_client_is_one_sentence_whatever_the_request_ids() -> None:
    refusal = "Error code: 400 - {'detail': 'Not here.', 'request_id': '%s'}"
    rows = {
        "TrainingClient.forward": (SUPPORTED, ""),
        "TrainingClient.step": (REFUSED, refusal % "1"),
        "BackcompatTrainingClientFuture.forward": (SUPPORTED, ""),
        "BackcompatTrainingClientFuture.step": (REFUSED, refusal % "2"),
    }
    page = render([found("1.0", {}), found("2.0", rows)], TODAY)
    assert "Every member of `TrainingClient` in 2.0 has the same result here." in page
    assert read(page)["BackcompatTrainingClientFuture.step"] == ["", "no (1)"]


def found(sdk: str, results: dict[str, tuple[str, str]]) -> dict[str, Any]:
    return {"version": sdk, "rows": results, "unpassed": {}}


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("Not here.", "Not here."),
        (
            "Invalid request Details: Error code: 400 - {'detail': \"It's full.\", 'code': 'a'}",
            "Invalid request Details: It's full.",
        ),
        ("No run 0f2a9c1b77d04e6f:train:3 at http://127.0.0.1:8123", "No run <id> at <server>"),
        ("a | b", r"a \| b"),
    ],
)
def test_a_reason_keeps_its_message_and_drops_varying_parts(words: str, kept: str) -> None:
    assert reason(words) == kept


def test_an_error_of_an_sdk_is_labelled_as_such() -> None:
    words = "AssertionError: AsyncTinker client called from incorrect event loop"
    assert reason(words).startswith(f"{words} (a fault of these SDK versions: ")


# ---- The walk ------------------------------------------------------------------------------------


def test_a_method_without_a_recipe_is_reported_as_not_tried() -> None:
    def recipe(_: Any) -> Call:
        return Call(None)

    laid_out = rows({"A": {"a": recipe, "a(b)": recipe}}, {"A": ["a", "a_async", "c"]})
    assert [(row.name, row.recipe is not None) for row in laid_out] == [
        ("A.a", True),
        ("A.a(b)", True),
        ("A.a_async", True),
        ("A.c", False),
    ]


def test_every_method_of_the_installed_sdk_has_a_recipe() -> None:
    from tests.conformance.scoreboard.commands import COMMANDS
    from tests.conformance.scoreboard.recipes import RECIPES

    assert [row.name for row in rows(RECIPES, surface.members()) if row.recipe is None] == []
    assert set(surface.commands()) == {name.partition("(")[0] for name in COMMANDS}


class Offers:
    """A client of a made-up SDK."""

    def add(self, a: int, b: int = 0) -> Any:
        return SimpleNamespace(result=lambda _: a + b)

    async def add_async(self, a: int) -> Any:
        return self.add(a)

    @property
    def name(self) -> str:
        return "offers"


@pytest.mark.parametrize(
    ("name", "args", "options", "answer"),
    [("add", (1,), {"b": 2}, 3), ("add_async", (1,), {}, 1), ("name", (), {}, "offers")],
)
def test_a_call_waits_for_every_kind_of_promise(
    name: str, args: tuple[Any, ...], options: dict[str, Any], answer: Any
) -> None:
    perform(Call(Offers(), args, options, lambda answered: answered == answer), name, set())


def test_a_call_records_its_parameters() -> None:
    passed: set[str] = set()
    perform(Call(Offers(), (1,), {"b": 2}), "add", passed)
    assert passed == parameters(Offers, "add") == {"a", "b"}


def test_a_call_with_a_wrong_answer_fails() -> None:
    with pytest.raises(UnexpectedAnswer, match="Answered 1"):
        perform(Call(Offers(), (1,), {}, lambda answer: answer == 2), "add", set())


def test_an_argument_that_a_version_rejects_is_reported_as_absent() -> None:
    with pytest.raises(NotOffered) as refused:
        perform(Call(Offers(), (1,), {"c": 2}), "add", set())
    assert judge(refused.value) == (ABSENT, "")


def http_error(kind: type[tinker.APIStatusError], status: int) -> tinker.APIStatusError:
    response = httpx.Response(status, request=httpx.Request("POST", "http://a"))
    return kind("Error code", response=response, body={"detail": "In its own words."})


@pytest.mark.parametrize(
    ("error", "judged"),
    [
        (http_error(tinker.NotFoundError, 404), (REFUSED, "In its own words.")),
        (http_error(tinker.InternalServerError, 501), (REFUSED, "In its own words.")),
        (http_error(tinker.InternalServerError, 500), (FAILED, "InternalServerError: In its own words.")),
        (RuntimeError("Not so."), (REFUSED, "The SDK itself: Not so.")),
        (KeyError("loss:sum"), (FAILED, "KeyError: 'loss:sum'")),
    ],
)
def test_refusals_and_failures_are_distinguished(error: Exception, judged: Sequence[str]) -> None:
    assert judge(error) == judged


@pytest.mark.variants
def test_a_part_of_the_walk_measures_a_live_server(server: Server) -> None:
    wanted = {
        "RestClient.get_server_capabilities": SUPPORTED,
        "SamplingClient.sample(prompt_alt_tokens_k)": REFUSED,
        "TrainingClient.forward": SUPPORTED,
        "TrainingClient.forward_async": SUPPORTED,
        "tinker checkpoint info": SUPPORTED,
    }
    measured = walk(INSTALLED, server.address, server.base_model, *wanted)["rows"]
    assert {name: outcome for name, (outcome, _) in measured.items()} == wanted
    assert "prompt_alt_tokens_k" in measured["SamplingClient.sample(prompt_alt_tokens_k)"][1]
