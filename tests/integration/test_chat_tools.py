"""Tool calls and reasoning through the official packages, with a worker that follows a script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from cotrain_server.app import create_app
from cotrain_server.settings import ServerSettings
from tests.support.http_api import ALICE, POOL
from tests.support.redis_server import EmbeddedRedis
from tests.support.talking import VOCABULARY, Script, Talking, talking_api, write_language

MODEL = POOL.base_model
TEMPLATE = """{# <think> <tool_call> #}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}
{%- for c in m.tool_calls or [] %}[{{ c.function.name ~ c.function.arguments.c }}]{% endfor %}|{% endfor %}
{%- for t in tools or [] %}T:{{ t.function.name }}|{% endfor %}
{%- if add_generation_prompt %}a:{% if enable_thinking is defined and not enable_thinking %}X{% endif %}{% endif %}"""
SCHEMA: Any = {"type": "object", "properties": {"c": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "w", "parameters": SCHEMA}}
HI: Any = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>{"name": "w", "arguments": {"c": "Köln"}}</tool_call>'
SAID = f"<think>Hm.</think>I look. {CALL}"


@pytest.fixture(scope="module")
def served(redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talking]:
    redis_server.flush()
    folder = tmp_path_factory.mktemp("data")
    with talking_api(redis_server.url, folder) as talking:
        write_language(folder, TEMPLATE)
        yield talking


@pytest.fixture
def script(script: Script) -> Script:
    """Script of a worker that writes a call."""
    script.text = SAID
    return script


def prompt_of(script: Script) -> str:
    return VOCABULARY.decode(list(script.seen[-1].prompt))


def test_a_call_makes_a_round_trip_through_openai(openai_client: openai.OpenAI, script: Script) -> None:
    asked: Any = {"model": MODEL, "messages": HI, "tools": [TOOL]}
    choice = openai_client.chat.completions.create(**asked).choices[0]
    assert prompt_of(script) == "u:Hi|T:w|a:"
    message: Any = choice.message
    (call,) = message.tool_calls
    assert (choice.finish_reason, message.content) == ("tool_calls", "I look.")
    assert (call.function.name, call.function.arguments) == ("w", '{"c": "Köln"}')
    assert message.reasoning_content == "Hm."
    with openai_client.chat.completions.stream(**asked) as stream:
        streamed: Any = stream.get_final_completion().choices[0]
    (same,) = streamed.message.tool_calls
    assert (streamed.finish_reason, streamed.message.content) == ("tool_calls", "I look.")
    assert (same.function.name, same.function.arguments) == ("w", '{"c": "Köln"}')
    script.text = "It rains."
    history = [*HI, message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    last = openai_client.chat.completions.create(**{**asked, "messages": history}).choices[0]
    assert (last.finish_reason, last.message.content) == ("stop", "It rains.")
    assert "a:I look.[wKöln]|t:rain|" in prompt_of(script)


def test_a_call_makes_a_round_trip_through_anthropic(anthropic_client: anthropic.Anthropic, script: Script) -> None:
    tool = {"name": "w", "input_schema": SCHEMA}
    asked: Any = {"model": MODEL, "messages": HI, "tools": [tool], "max_tokens": 99}
    message = anthropic_client.messages.create(**asked)
    assert prompt_of(script) == "u:Hi|T:w|a:"
    with anthropic_client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for each in (message, streamed):
        thought, text, call = each.content
        assert (thought.type, text.type, call.type) == ("thinking", "text", "tool_use")
        assert (thought.thinking, text.text) == ("Hm.", "I look.")
        assert (call.name, call.input, each.stop_reason) == ("w", {"c": "Köln"}, "tool_use")
    script.text = "It rains."
    result = {"type": "tool_result", "tool_use_id": message.content[2].id, "content": "rain"}
    history = [*HI, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    last = anthropic_client.messages.create(**{**asked, "messages": history})
    assert (last.stop_reason, last.content[0].type) == ("end_turn", "text")
    assert "a:I look.[wKöln]|t:rain|" in prompt_of(script)
    counted = anthropic_client.messages.count_tokens(model=MODEL, messages=history, tools=[tool])
    assert counted.input_tokens == len(script.seen[-1].prompt)


def test_a_call_makes_a_round_trip_through_the_responses_api(openai_client: openai.OpenAI, script: Script) -> None:
    tool: Any = {"type": "function", "name": "w", "parameters": SCHEMA, "strict": False}
    asked: Any = {"model": MODEL, "instructions": "Be short.", "tools": [tool]}
    whole = openai_client.responses.create(**asked, input="Hi")
    assert prompt_of(script) == "s:Be short.|u:Hi|T:w|a:"
    with openai_client.responses.stream(**asked, input="Hi") as stream:
        names = [each.type for each in stream]
        streamed = stream.get_final_response()
    assert (names[0], names[-1]) == ("response.created", "response.completed")
    assert "response.function_call_arguments.delta" in names
    call: dict[str, Any] = {}
    for each in (whole, streamed):
        thought, text, call = (item.model_dump() for item in each.output)
        assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
        assert (each.output_text, text["status"], each.status) == ("I look.", *["completed"] * 2)
        assert (call["name"], call["arguments"]) == ("w", '{"c": "Köln"}')
    script.text = "It rains."
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    history: Any = [*HI, *streamed.model_dump()["output"], result]
    last = openai_client.responses.create(**asked, input=history)
    assert "a:I look.[wKöln]|t:rain|" in prompt_of(script)
    counted = openai_client.responses.input_tokens.count(**asked, input=history).input_tokens
    usage = last.usage
    assert usage is not None
    assert usage.input_tokens == counted == len(script.seen[-1].prompt)
    with openai_client.responses.create(**asked, input=HI, max_output_tokens=4, stream=True) as raw:
        cut: Any = list(raw)[-1].model_dump()
    assert cut["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert cut["response"]["output"][0]["content"][0]["text"] == "It rain"


def test_a_whole_response_has_its_items_in_the_order_of_its_stream(
    openai_client: openai.OpenAI, script: Script
) -> None:
    script.text = f"{CALL} Wait."
    tool: Any = {"type": "function", "name": "w", "parameters": SCHEMA, "strict": False}
    asked: Any = {"model": MODEL, "input": "Hi", "tools": [tool]}
    with openai_client.responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    for each in (streamed, openai_client.responses.create(**asked)):
        assert [item.type for item in each.output] == ["function_call", "message"]


def test_the_log_probs_of_a_response_are_those_of_a_chat(openai_client: openai.OpenAI, script: Script) -> None:
    script.text = "Hi"
    chat = openai_client.chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=2)
    expected: Any = chat.choices[0].logprobs
    asked: Any = {"model": MODEL, "input": HI, "top_logprobs": 2}
    with openai_client.responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    for each in (openai_client.responses.create(**asked), streamed):
        text: Any = each.output[0]
        assert [e.to_dict() for e in text.content[0].logprobs] == expected.to_dict()["content"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("previous_response_id", "resp_1", "Send the whole history in input"),
        ("max_tokens", 3, "send max_output_tokens"),
        ("n", 2, "n must be 1"),
        ("include", ["file_search_call.results"], "include: 'file_search_call.results'"),
        ("input", [{"type": "item_reference", "id": "1"}], r"input\[0\].type: 'item_reference'"),
        ("input", [{"role": "user", "content": [{"type": "input_image"}]}], r"input\[0\].content"),
        ("input", [{"role": "wizard", "content": "a"}], r"input\[0\].role: 'wizard'"),
        ("tools", [{"type": "web_search"}], r"tools\[0\]: only tools of type 'function'"),
        ("tool_choice", {"type": "function", "name": "f"}, "tool_choice.name: tools has no"),
        ("text", {"format": {"type": "json_schema"}}, "text.format: the schema"),
        ("text", {"verbosity": "low"}, "text.verbosity is not supported"),
    ],
)
def test_a_field_that_the_responses_api_cannot_honour_is_refused(
    openai_client: openai.OpenAI, field: str, value: Any, message: str
) -> None:
    asked: dict[str, Any] = {"input": "a", field: value}
    with pytest.raises(openai.BadRequestError, match=message):
        openai_client.responses.create(model=MODEL, input="a", extra_body=asked)


def test_reasoning_is_turned_off_by_each_api(
    openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic, script: Script
) -> None:
    script.text = "Hi"
    openai_client.chat.completions.create(model=MODEL, messages=HI, reasoning_effort="none")
    off = prompt_of(script)
    anthropic_client.messages.create(model=MODEL, messages=HI, max_tokens=9, thinking={"type": "disabled"})
    assert off == prompt_of(script) == "u:Hi|a:X"
    openai_client.chat.completions.create(model=MODEL, messages=HI, reasoning_effort="low")
    assert prompt_of(script) == "u:Hi|a:"
    with pytest.raises(openai.BadRequestError, match=r"chat_template_kwargs.tools"):
        openai_client.chat.completions.create(
            model=MODEL, messages=HI, extra_body={"chat_template_kwargs": {"tools": [TOOL]}}
        )


@pytest.mark.parametrize(("path", "status", "where"), [("nothing", 404, "type"), ("messages", 405, "message")])
@pytest.mark.parametrize("api", ["oai/api/v1", "anthropic/api/v1"])
def test_an_unknown_path_has_the_error_format_of_its_api(
    served: Talking, api: str, path: str, status: int, where: str
) -> None:
    answer = httpx.get(f"{served.address}/{api}/{path}")
    assert answer.status_code == (404 if api.startswith("oai") else status)
    assert where in answer.json()["error"]
    assert ("request_id" in answer.json()) == api.startswith("anthropic")


def test_head_and_options_are_answered_for_every_path(served: Talking) -> None:
    get, head = (getattr(httpx, each)(f"{served.address}/healthz") for each in ("get", "head"))
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(get.content))
    options = httpx.options(f"{served.address}/oai/api/v1/chat/completions")
    assert (options.status_code, options.headers["allow"]) == (204, "POST")
    assert "access-control-allow-origin" not in options.headers
    assert httpx.options(f"{served.address}/nothing").status_code == 404


async def test_pages_of_configured_origins_may_call_the_api(tmp_path: Path) -> None:
    settings = ServerSettings(redis_url="unix:///nowhere", data_dir=tmp_path, cors_origins=("https://app.test",))
    asked = {
        "Origin": "https://app.test",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    transport = httpx.ASGITransport(create_app(settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://a") as http:
        mine = await http.options("/oai/api/v1/models", headers=asked)
        foreign = await http.options("/oai/api/v1/models", headers={**asked, "Origin": "https://b.test"})
    assert mine.headers["access-control-allow-origin"] == "https://app.test"
    assert "authorization" in mine.headers["access-control-allow-headers"].lower()
    assert "access-control-allow-origin" not in foreign.headers


def test_a_model_is_found_by_its_name(
    served: Talking, openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic
) -> None:
    assert openai_client.models.retrieve(MODEL).id == anthropic_client.models.retrieve(MODEL).id == MODEL
    url = f"{served.address}/oai/api/v1/models/{MODEL}"
    assert "/" in MODEL
    assert httpx.get(url, headers={"x-api-key": ALICE}).json()["id"] == MODEL
    with pytest.raises(openai.NotFoundError) as unknown:
        openai_client.models.retrieve("tiny/unknown")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(anthropic.NotFoundError):
        anthropic_client.models.retrieve("tiny/unknown")
