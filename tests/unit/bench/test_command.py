"""The command `python -m bench`."""

from __future__ import annotations

import argparse

import pytest

from bench.__main__ import main, scenarios
from bench.support.record import Choice, Some, add_options


def test_without_a_name_the_command_lists_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0

    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == list(scenarios())
    assert all(line.endswith(".") for line in lines)


def test_an_unknown_name_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines"]) == 2

    assert "no benchmark 'engines'; there are cost, decode, engine" in capsys.readouterr().err


@pytest.mark.parametrize("name", scenarios())
def test_every_benchmark_prints_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])

    assert ended.value.code == 0
    assert f"usage: python -m bench {name}" in capsys.readouterr().out


def test_the_type_of_an_option_follows_from_its_default() -> None:
    parser = argparse.ArgumentParser()
    add_options(
        parser,
        {
            "rounds": (3, "of all"), "seconds": 1.5, "sizes": [1], "names": ["a"], "quiet": False,
            "limit_s": float, "device": Choice(("cpu", "cuda"), is_required=True), "parts": Some(("a", "b")),
        },
    )  # fmt: skip

    given = [
        "--device",
        "cpu",
        "--rounds",
        "2",
        "--seconds",
        "2",
        "--sizes",
        "4,5",
        "--names",
        "x,y",
        "--quiet",
        "--parts",
        "b",
    ]
    args = vars(parser.parse_args(given))
    assert args.pop("out").name == "results"
    assert args == {
        "device": "cpu", "rounds": 2, "seconds": 2.0, "sizes": [4, 5], "names": ["x", "y"], "quiet": True,
        "limit_s": None, "parts": ["b"],
    }  # fmt: skip


def test_a_value_out_of_a_list_is_refused_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, {"parts": Some(("a", "b"))})

    with pytest.raises(SystemExit):
        parser.parse_args(["--parts", "a,c"])

    assert "argument --parts: 'c' is none of a, b" in capsys.readouterr().err
