"""A tool's call and result through the `openai` package, with a real model and a Hermes template.

A random model writes no call by itself, so `tool_choice` holds the answer to one. Scripted answers
of the other APIs are in tests/integration/test_chat_tools.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import transformers

from tests.conformance.running import KEYS
from tests.support.serving import Serving
from tests.support.tiny_models import build_tiny_with_tools

SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Köln"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: Any = {"name": "weather", "description": "Weather of a city.", "parameters": SCHEMA}
HI: Any = [{"role": "user", "content": "Weather?"}]
RESULT = "22 °C"


@dataclass(frozen=True)
class Served:
    """A server, its model, and the judge of the model's prompts."""

    address: str
    model: str
    tokenizer: Any

    def prompt_tokens(self, messages: list[Any]) -> int:
        """Return the length of a prompt as `transformers` renders it."""
        tool = {"type": "function", "function": FUNCTION}
        return len(
            self.tokenizer.apply_chat_template(messages, tools=[tool], add_generation_prompt=True, return_dict=False)
        )

    def history(self, arguments: Any) -> list[Any]:
        """Return the messages after a call of the model, with its result."""
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        assistant = {"role": "assistant", "content": "", "tool_calls": [call]}
        return [*HI, assistant, {"role": "tool", "content": RESULT}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = build_tiny_with_tools(tmp_path_factory.mktemp("models") / "tools")
    data_dir = tmp_path_factory.mktemp("data")
    with Serving(data_dir, [str(folder)], KEYS[:1]) as serving:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        yield Served(serving.address, str(folder), tokenizer)


@pytest.fixture(scope="module")
def mine(served: Served) -> Iterator[openai.OpenAI]:
    base_url = f"{served.address}/oai/api/v1"
    with openai.OpenAI(base_url=base_url, api_key=KEYS[0], max_retries=0) as opened:
        yield opened


def test_a_call_and_its_result_pass_through_openai(served: Served, mine: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": FUNCTION}
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    asked: Any = {"model": served.model, "tools": [tool]}
    with mine.chat.completions.stream(
        **asked, messages=HI, tool_choice=choice, stream_options={"include_usage": True}
    ) as stream:
        called = stream.get_final_completion()
    message: Any = called.choices[0].message
    (call,) = message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert (call.function.name, called.choices[0].finish_reason) == ("weather", "tool_calls")
    assert arguments["city"] in SCHEMA["properties"]["city"]["enum"]
    assert called.usage is not None
    assert called.usage.prompt_tokens == served.prompt_tokens(HI)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    history = [*HI, message, result]
    with mine.chat.completions.create(
        **asked, messages=history, max_tokens=9, stream=True, stream_options={"include_usage": True}
    ) as chunks:
        *parts, last = list(chunks)
    assert "".join(part.choices[0].delta.content or "" for part in parts)
    assert last.usage is not None
    assert last.usage.prompt_tokens == served.prompt_tokens(served.history(arguments))
