"""Working folder in which the cookbook's programs find a model and data under their hub names.

`datasets` and `transformers` look for a folder of that name in the working directory before they
request it from a hub. So a program started here needs no change and no network: `Qwen/Qwen3-8B` is
a tiny model with a real tokenizer, `openai/gsm8k` a few lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.support.chat_model import build_chat_model

Row = Mapping[str, object]

BASE_MODEL = "Qwen/Qwen3-8B"  # the cookbook has a renderer for this name
CHATS = "chats.jsonl"
LESSONS = "lessons.jsonl"
THINGS = ("lamp", "river", "button", "cloud", "window", "spoon", "ladder", "engine")
#: Answer of every gsm8k question here: a number that the untrained model also generates.
ANSWER = 3
#: Answer that a teacher is trained to give.
SOLUTION = f"\\boxed{{{ANSWER}}}"


def build_workshop(folder: Path) -> Path:
    """Write model and data. Return the folder."""
    build_chat_model(folder / BASE_MODEL)
    counted = [(thing, number) for number in range(1, 17) for thing in THINGS]
    chats = [
        chat(f"How many {thing}s are {number} {thing}s?", f"That makes {number} {thing}s.") for thing, number in counted
    ]
    lessons = [chat(f"How many {thing}s has box {number}?", SOLUTION) for thing, number in counted]
    questions = [question(thing, number) for thing, number in counted]
    pairs = [comparison(thing, number) for thing, number in counted]
    write(folder / CHATS, chats)
    write(folder / LESSONS, lessons)
    write(folder / "HuggingFaceH4/no_robots/train.jsonl", chats)
    write(folder / "zwhe99/DeepMath-103K/train.jsonl", questions)
    write(folder / "Anthropic/hh-rlhf/train.jsonl", pairs)
    write(folder / "Anthropic/hh-rlhf/test.jsonl", pairs[:8])
    write(folder / "openai/gsm8k/train.jsonl", questions)
    (folder / "openai/gsm8k/README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n"
    )
    return folder


def chat(asked: str, answered: str) -> Row:
    """Make a conversation in the format of no_robots."""
    turns = {"user": asked, "assistant": answered}
    return {"messages": [{"role": role, "content": said} for role, said in turns.items()]}


def question(thing: str, number: int) -> Row:
    """Make a problem in the format of gsm8k, which DeepMath reads as well."""
    answer = f"There are {ANSWER} of them.\n#### {ANSWER}"
    return {"question": f"How many {thing}s has box {number}?", "answer": answer}


def comparison(thing: str, number: int) -> Row:
    """Make a pair in the format of hh-rlhf: the better of two answers."""
    opening = f"\n\nHuman: Is a {thing} number {number} good?\n\nAssistant:"
    return {"chosen": f"{opening} Yes, it is.", "rejected": f"{opening} No, never."}


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
