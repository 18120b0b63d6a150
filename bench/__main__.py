"""Benchmarks as one command: `python -m bench NAME [options]`. Without a name it lists them.

A scenario is a file of this folder, or the file `scenario.py` of a room. It has a docstring, OPTIONS, and `run(args,
report)`, which prints figures and returns the exit status. Anything that it adds to the report is written as JSON.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.support.record import Report, add_options, prepare_torch, show

FOLDER = Path(__file__).resolve().parent


def scenarios() -> dict[str, str]:
    """Return the first line of each scenario's docstring, by name, without importing it."""
    files = {file.stem: file for file in FOLDER.glob("[!_]*.py")}
    files |= {file.parent.name: file for file in FOLDER.glob("*/scenario.py")}
    texts = {name: ast.get_docstring(ast.parse(files[name].read_text())) for name in sorted(files)}
    return {name: (text or "").partition("\n")[0] for name, text in texts.items()}


def main(argv: Sequence[str] | None = None) -> int:
    name, *given = (sys.argv[1:] if argv is None else argv) or ["--help"]
    known = scenarios()
    if name in ("-h", "--help"):
        print("usage: python -m bench NAME [options]      (python -m bench NAME --help: its options)\n")
        print("\n".join(f"{each:<22} {line}" for each, line in known.items()))
        return 0
    if name not in known:
        print(f"bench: no benchmark {name!r}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    # At the end, so that installed versions, or those of PYTHONPATH, come first. A GPU machine has none.
    sys.path += [str(FOLDER.parent / package) for package in ("client", "scheduler", "server", "workers")]
    room = (FOLDER / name).is_dir()
    scenario = importlib.import_module(f"bench.{name}.scenario" if room else f"bench.{name}")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"python -m bench {name}", description=scenario.__doc__, formatter_class=form)
    add_options(parser, scenario.OPTIONS)
    args = parser.parse_args(given)
    if "device" in args:
        prepare_torch(args.threads)
    report = Report(name, args, given)
    if "device" in args:
        show(report["machine"])
    ended = scenario.run(args, report)
    if report.is_filled:
        report.write()
        print(f"wrote {report.path}")
    return int(ended or 0)


if __name__ == "__main__":
    raise SystemExit(main())
