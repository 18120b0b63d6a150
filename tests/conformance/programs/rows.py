"""Uses of each chat program, run by the interpreter of `.programs`, which has no cotrain.

`python rows.py PROGRAM` prints the program's version and the outcome of each use as JSON. The variables
OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and MODEL name the server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

MODEL, KEY, OPENAI = (os.environ.get(name, "") for name in ("MODEL", "OPENAI_API_KEY", "OPENAI_BASE_URL"))
FEW, TOKENS = 12, 600  # a random model ends no text, and writes much white space in a schema
TRIES = 3
HI: Any = [{"role": "user", "content": "Weather?"}]


class Weather(BaseModel):
    """Weather of a city."""

    model_config = ConfigDict(extra="forbid")  # a random model would add many fields

    city: Literal["Bern", "Oslo"]
    degrees: Literal[-3, 22]


TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather of a city.", "parameters": Weather.model_json_schema()},
}
Use = Callable[[], object]


def litellm() -> Mapping[str, Use]:
    """Return uses of LiteLLM: both APIs as providers, and the Responses API."""
    import litellm

    mine: Any = {"model": f"openai/{MODEL}", "messages": HI, "max_tokens": FEW}
    theirs: Any = {**mine, "model": f"anthropic/{MODEL}"}

    def streamed() -> bool:
        parts = [part.choices[0].delta.content or "" for part in litellm.completion(**mine, stream=True)]
        return len(parts) > 2 and bool("".join(parts))

    def schema(**asked: Any) -> object:
        answer = litellm.completion(**asked, response_format=Weather)
        return Weather.model_validate_json(answer.choices[0].message.content)

    def round_trip(**asked: Any) -> bool:
        asked = {**asked, "tools": [TOOL]}
        message = litellm.completion(**asked, tool_choice="required").choices[0].message
        (call,) = message.tool_calls
        Weather.model_validate_json(call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        asked |= {"messages": [*HI, message, result], "max_tokens": FEW}
        return bool(litellm.completion(**asked).choices[0].message.content)

    def response() -> bool:
        asked = {"model": f"openai/{MODEL}", "input": "Hi", "max_output_tokens": 9}
        return bool(litellm.responses(**asked).output[0].content[0].text)

    return {
        "chat": lambda: litellm.completion(**mine).choices[0].message.content,
        "stream": streamed,
        "schema": lambda: schema(**{**mine, "max_tokens": TOKENS}),
        "tool call and result": lambda: round_trip(**{**mine, "max_tokens": TOKENS}),
        "completion": lambda: (
            litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="Hi", max_tokens=9).choices[0].text
        ),
        "Responses API": response,
        "Anthropic: chat": lambda: litellm.completion(**theirs).choices[0].message.content,
        "Anthropic: tool call and result": lambda: round_trip(**{**theirs, "max_tokens": TOKENS}),
    }


def langchain_openai() -> Mapping[str, Use]:
    """Return uses of LangChain with OpenAI's API."""
    from langchain_openai import ChatOpenAI

    def chat(max_tokens: int = FEW, **options: Any) -> Any:
        return ChatOpenAI(model=MODEL, max_tokens=max_tokens, **options)

    return {
        "chat": lambda: chat().invoke("Hi").content,
        "stream": lambda: "".join(part.content for part in chat().stream("Hi")),
        **{
            f"structured output by {method}": lambda method=method: _is_weather(
                chat(TOKENS).with_structured_output(Weather, method=method).invoke("Weather?")
            )
            for method in ("json_schema", "function_calling")
        },
        "tool call and result": lambda: _langchain_round_trip(chat),
        "Responses API": lambda: chat(use_responses_api=True).invoke("Hi").text,
    }


def langchain_anthropic() -> Mapping[str, Use]:
    """Return uses of LangChain with Anthropic's API."""
    from langchain_anthropic import ChatAnthropic

    def chat(max_tokens: int = FEW) -> Any:
        return ChatAnthropic(model=MODEL, max_tokens=max_tokens)

    return {
        "chat": lambda: chat().invoke("Hi").content,
        "stream": lambda: "".join(part.text for part in chat().stream("Hi")),
        "structured output by function_calling": lambda: _is_weather(
            chat(TOKENS).with_structured_output(Weather).invoke("Weather?")
        ),
        "tool call and result": lambda: _langchain_round_trip(chat),
    }


def _langchain_round_trip(chat: Any) -> object:
    from langchain_core.messages import HumanMessage, ToolMessage

    first = HumanMessage("Weather?")
    called = chat(TOKENS).bind_tools([TOOL], tool_choice="any").invoke([first])
    (call,) = called.tool_calls
    Weather.model_validate(call["args"])
    result = ToolMessage("rain", tool_call_id=call["id"])
    return chat().bind_tools([TOOL]).invoke([first, called, result]).content


def instructor() -> Mapping[str, Use]:
    """Return uses of instructor: models from tools and from schemas."""
    import anthropic
    import instructor
    import openai

    def ask(client: Any, **options: Any) -> bool:
        made = client.chat.completions.create(
            model=MODEL, messages=HI, response_model=Weather, max_tokens=TOKENS, max_retries=1, **options
        )
        return _is_weather(made)

    def partial() -> bool:
        client = instructor.from_openai(openai.OpenAI(), mode=instructor.Mode.JSON_SCHEMA)
        *_, last = client.chat.completions.create_partial(
            model=MODEL, messages=HI, response_model=Weather, max_tokens=TOKENS
        )
        return str(last.city) in ("Bern", "Oslo")

    mode = instructor.Mode
    return {
        "tools": lambda: ask(instructor.from_openai(openai.OpenAI(), mode=mode.TOOLS)),
        "JSON schema": lambda: ask(instructor.from_openai(openai.OpenAI(), mode=mode.JSON_SCHEMA)),
        "partial models from a stream": partial,
        "Responses API": lambda: ask(instructor.from_openai(openai.OpenAI(), mode=mode.RESPONSES_TOOLS)),
        "Anthropic: tools": lambda: ask(instructor.from_anthropic(anthropic.Anthropic(), mode=mode.ANTHROPIC_TOOLS)),
    }


def dspy() -> Mapping[str, Use]:
    """Return uses of DSPy: a bare language model, and a signature with a schema."""
    import dspy
    import litellm

    def lm(max_tokens: int) -> Any:
        model, access = f"openai/{MODEL}", {"api_base": OPENAI, "api_key": KEY}
        return dspy.LM(model, **access, max_tokens=max_tokens, cache=False)

    class Ask(dspy.Signature):
        """Name the weather of a city."""

        question: str = dspy.InputField()
        city: Literal["Bern", "Oslo"] = dspy.OutputField()

    def signature() -> bool:
        # LiteLLM has a list of models with schemas, to which a user adds a model.
        known = {"litellm_provider": "openai", "mode": "chat", "supports_response_schema": True}
        litellm.register_model({MODEL: known})
        with dspy.context(lm=lm(TOKENS), adapter=dspy.JSONAdapter()):
            return dspy.Predict(Ask)(question="Weather?").city in ("Bern", "Oslo")

    return {"language model": lambda: lm(FEW)("Hi")[0], "signature with a schema": signature}


def llm() -> Mapping[str, Use]:
    """Return uses of the command `llm`, with a model of `extra-openai-models.yaml`."""
    home = Path(tempfile.mkdtemp())
    settings = {
        "model_id": "mine",
        "model_name": MODEL,
        "api_base": OPENAI,
        "api_key_name": "mine",
        "supports_schema": True,
        "supports_tools": True,
    }
    (home / "keys.json").write_text(json.dumps({"mine": KEY}))
    (home / "extra-openai-models.yaml").write_text(json.dumps([settings]))

    def run(*arguments: str) -> str:
        command = [str(Path(sys.executable).parent / "llm"), "-m", "mine", *arguments]
        environment = {**os.environ, "LLM_USER_PATH": str(home)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    schema = json.dumps(Weather.model_json_schema())
    return {
        "chat, streamed": lambda: run("Hi", "-o", "max_tokens", "20"),
        "chat, not streamed": lambda: run("Hi", "--no-stream", "-o", "max_tokens", "20"),
        "schema": lambda: Weather.model_validate_json(run("Weather?", "--schema", schema)),
        "tools": lambda: run("Time?", "--tool", "llm_time", "-o", "max_tokens", "20"),
    }


def inspect_ai() -> Mapping[str, Use]:
    """Return uses of Inspect: evaluations through each API."""
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, ResponseSchema
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import ToolFunction, tool
    from inspect_ai.util import json_schema

    @tool
    def weather() -> Any:
        async def execute(city: Literal["Bern", "Oslo"]) -> str:
            """Return the weather of a city.

            Args:
                city: Name of the city.
            """
            return f"rain in {city}"

        return execute

    def run(api: str, *, solver: Any = None, responses: bool = False, **config: Any) -> bool:
        task = Task(
            dataset=[Sample(input="Weather?", target="")],
            solver=solver or generate(),
            scorer=includes(),
            config=GenerateConfig(**{"max_tokens": FEW, **config}),
        )
        arguments = {"responses_api": responses} if api == "openai" else {}
        with tempfile.TemporaryDirectory() as folder:
            (log,) = eval(task, f"{api}/{MODEL}", model_args=arguments, display="none", log_dir=folder)
            assert log.status == "success", log.error and log.error.message
            assert log.samples
            ends = [choice.stop_reason for choice in log.samples[0].output.choices]
            # Inspect makes an answer of some refusals, with another reason
            assert set(ends) <= {"stop", "max_tokens", "tool_calls"}, log.samples[0].output
            roles = [message.role for message in log.samples[0].messages]
        return roles[-1] == "assistant" and ("tool" in roles) == bool(solver)

    # Inspect repeats "any" with each answer without end, and a named tool once.
    tools = [use_tools(weather(), tool_choice=ToolFunction(name="weather")), generate()]
    schema = ResponseSchema(name="weather", json_schema=json_schema(Weather))
    return {
        "evaluation": lambda: run("openai"),
        "schema": lambda: run("openai", response_schema=schema, max_tokens=TOKENS),
        "log-probs": lambda: run("openai", logprobs=True, top_logprobs=2),
        "tool call and result": lambda: run("openai", solver=tools, max_tokens=200),
        "Responses API: evaluation": lambda: run("openai", responses=True),
        "Responses API: tool call and result": lambda: run("openai", solver=tools, responses=True, max_tokens=200),
        "Anthropic: evaluation": lambda: run("anthropic"),
        "Anthropic: tool call and result": lambda: run("anthropic", solver=tools, max_tokens=200),
    }


def _is_weather(made: Any) -> bool:
    return isinstance(made, Weather)


PROGRAMS: Mapping[str, Callable[[], Mapping[str, Use]]] = {
    "litellm": litellm,
    "langchain-openai": langchain_openai,
    "langchain-anthropic": langchain_anthropic,
    "instructor": instructor,
    "dspy": dspy,
    "llm": llm,
    "inspect-ai": inspect_ai,
}


def outcome(use: Use) -> str:
    """Return an empty text if a use succeeds, else its reason."""
    try:
        # the random model ends one answer in 40 before its first word
        return "" if any(use() for _ in range(TRIES)) else "It returned nothing."
    except Exception as error:  # noqa: BLE001  # each exception of a program is a result
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    name = sys.argv[1]
    found = {use: outcome(act) for use, act in PROGRAMS[name]().items()}
    json.dump({"program": name, "version": version(name), "uses": found}, sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # some programs leave threads behind
