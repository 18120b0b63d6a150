"""Run the uses of each chat program against a server.

Run as `python -m tests.conformance.programs [PROGRAM…]` from the root, after `install.sh`. It prints the section that
`python -m tests.conformance.scoreboard` writes into docs/reference/compatibility.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from tests.conformance.running import KEYS, ROOT
from tests.support.serving import Serving
from tests.support.tiny_models import build_tiny_with_tools

PROGRAMS = {
    "litellm": "most",
    "langchain-openai": "most",
    "langchain-anthropic": "most",
    "instructor": "most",
    "dspy": "most",
    "llm": "most",
    "inspect-ai": "inspect",
}
NAME = "tiny"
PATIENCE_S = 1800
TITLE = "## Other programs"
INTRODUCTION = """{title}

The same command runs each use of these programs, unmodified, against the [chat endpoints](chat-apis.md) of a server with a tiny
model, here on {day}. Its chat template is in Hermes' form. In a tool call, `tool_choice` forces the first answer to be the call,
and the next request has its result.

| program | version | uses | |
|---|---|---|:-:|
"""


def run(program: str, address: str, model: str) -> dict[str, Any]:
    """Run the uses of one program in its environment."""
    mine, theirs = f"{address}/oai/api/v1", f"{address}/anthropic/api"
    environment = {
        **os.environ,
        "MODEL": model,
        "OPENAI_API_KEY": KEYS[0],
        "OPENAI_BASE_URL": mine,
        "ANTHROPIC_API_KEY": KEYS[0],
        "ANTHROPIC_BASE_URL": theirs,
        # LiteLLM's own names of the same
        "OPENAI_API_BASE": mine,
        "ANTHROPIC_API_BASE": theirs,
        # no program fetches anything
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    python = ROOT / ".programs" / PROGRAMS[program] / "bin" / "python"
    rows = Path(__file__).with_name("rows.py")
    done = subprocess.run(
        [str(python), str(rows), program],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def section(founds: Sequence[dict[str, Any]], day: date) -> str:
    """Return the section of the page. A failed use has a row with its reason."""
    lines = []
    for found in founds:
        named = f"| {found['program']} | {found['version']} |"
        if works := [use for use, reason in found["uses"].items() if not reason]:
            lines.append(f"{named} {'; '.join(works)} | yes |")
        lines += [
            f"{named} {use} | fails: {' '.join(reason.split())[:200]} |"
            for use, reason in found["uses"].items()
            if reason
        ]
    return INTRODUCTION.format(title=TITLE, day=day) + "\n".join(lines) + "\n"


def measured(programs: Sequence[str] = ()) -> str:
    """Serve a tiny model, run these programs or all, and return the section of the page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build_tiny_with_tools(folder / "tiny")
        # a name without "/", because Inspect strips the first one from a path
        with Serving(folder / "data", [f"{NAME}={model}"], KEYS[:1]) as serving:
            founds = [run(each, serving.address, NAME) for each in programs or PROGRAMS]
    return section(founds, datetime.now(UTC).date())


if __name__ == "__main__":
    print(measured(sys.argv[1:]))
