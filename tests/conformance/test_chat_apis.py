"""Chat APIs on a real server: an answer is the sample of its template, and tool calls pass through `openai`."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
import transformers

from cotrain import AdamParams, Datum, ModelInput, SamplingClient, SamplingParams, ServiceClient
from tests.conformance.running import KEYS, Server
from tests.support.serving import Serving
from tests.support.tiny_models import build_tiny_with_tools

VOCAB = 512
CHAT: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Grüße! 🙂 What is this?"}]
LENGTH = 12


@pytest.fixture(scope="module")
def tokenizer(server: Server) -> Any:
    """The judge of words and tokens."""
    return transformers.AutoTokenizer.from_pretrained(server.base_model)


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> list[int]:
    """The chat, as `transformers` writes it."""
    tokens: list[int] = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    return tokens


@pytest.fixture(scope="module")
def path(server: Server, service: ServiceClient) -> str:
    """Weights that were trained for a few steps."""
    run = service.create_lora_training_client(server.base_model, rank=4, seed=1)
    tokens = random.Random(0).choices(range(VOCAB), k=20)
    data = Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    for _ in range(3):
        run.forward_backward([data], "cross_entropy")
        run.optim_step(AdamParams(learning_rate=1e-2))
    saved = run.save_weights_for_sampler("trained").result().path
    assert saved is not None
    return saved


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    base_url = f"{server.address}/oai/api/v1"
    with openai.OpenAI(base_url=base_url, api_key=KEYS[0], max_retries=0) as opened:
        yield opened


@pytest.fixture
def messages_client(server: Server) -> Iterator[anthropic.Anthropic]:
    base_url = f"{server.address}/anthropic/api"
    with anthropic.Anthropic(base_url=base_url, api_key=KEYS[0], max_retries=0) as opened:
        yield opened


def said(tokenizer: Any, sampler: SamplingClient, prompt: list[int], **params: Any) -> list[str]:
    """Sample two continuations with our own client, as text."""
    sampled = sampler.sample(ModelInput.from_ints(prompt), 2, SamplingParams(max_tokens=LENGTH, **params)).result()
    return [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in sampled.sequences]


def test_a_chat_is_the_sample_of_its_template(
    server: Server, service: ServiceClient, client: openai.OpenAI, tokenizer: Any, prompt: list[int]
) -> None:
    sampler = service.create_sampling_client(base_model=server.base_model)
    answer = client.chat.completions.create(model=server.base_model, messages=CHAT, n=2, seed=7, max_tokens=LENGTH)
    expected = said(tokenizer, sampler, prompt, seed=7)
    assert [choice.message.content for choice in answer.choices] == expected
    assert expected[0] != expected[1]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)


def test_a_stream_adds_up_to_the_answer(server: Server, client: openai.OpenAI) -> None:
    asked: Any = {"model": server.base_model, "messages": CHAT, "seed": 3, "max_tokens": 40}
    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.create(**asked, stream=True) as stream:
        chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].finish_reason == whole.finish_reason
    assert chunks[-1].model_extra == whole.model_extra
    assert "policy_spans" in whole.model_extra


def test_trained_weights_answer_by_their_path(
    server: Server, service: ServiceClient, client: openai.OpenAI, tokenizer: Any, prompt: list[int], path: str
) -> None:
    asked: Any = {"prompt": prompt, "n": 2, "seed": 7, "max_tokens": LENGTH}
    base = client.completions.create(model=server.base_model, **asked)
    for model in (path, f"{server.base_model};{path}"):
        trained = client.completions.create(model=model, **asked)
        texts = [choice.text for choice in trained.choices]
        sampler = service.create_sampling_client(model_path=path)
        assert texts == said(tokenizer, sampler, prompt, seed=7)
        assert texts != [choice.text for choice in base.choices]
        spans = [choice.model_extra["policy_spans"] for choice in trained.choices]
        run = path.split("/")[2]
        assert spans == [[{"start": 0, "end": LENGTH, "training_run_id": run, "step": 3}]] * 2


def test_echoed_log_probs_are_those_our_own_client_computes(
    server: Server, service: ServiceClient, client: openai.OpenAI, prompt: list[int], path: str
) -> None:
    answer = client.completions.create(model=path, prompt=prompt, echo=True, logprobs=0, max_tokens=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    sampler = service.create_sampling_client(model_path=path)
    assert logprobs.token_logprobs == sampler.compute_logprobs(ModelInput.from_ints(prompt)).result()


def test_a_message_stops_at_its_stop_sequence(
    server: Server, messages_client: anthropic.Anthropic, tokenizer: Any
) -> None:
    greedy: Any = {"extra_body": {"temperature": 0}}
    asked: Any = {"model": server.base_model, "max_tokens": 40, **greedy}
    turns: Any = [CHAT[1], {"role": "assistant", "content": "It is"}]
    whole = messages_client.messages.create(messages=turns, system="Be short.", **asked)
    (block,) = whole.content
    assert block.type == "text"
    stop = block.text[5:8]
    with messages_client.messages.stream(messages=turns, system="Be short.", stop_sequences=[stop], **asked) as stream:
        cut = stream.get_final_message()
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert whole.model_extra["policy_spans"][0]["training_run_id"] is None
    assert cut.content[0].type == "text"
    assert cut.content[0].text == block.text[: block.text.index(stop)]


def test_a_schema_holds_the_answers_of_a_real_model(
    server: Server, client: openai.OpenAI, messages_client: anthropic.Anthropic
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}, "n": {"type": "integer", "maximum": 9}},
        "required": ["a"],
        "additionalProperties": False,
    }
    wrapped: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    asked: Any = {"model": server.base_model, "messages": CHAT, "response_format": wrapped, "n": 8}
    for choice in client.chat.completions.create(**asked).choices:
        assert choice.finish_reason == "stop"
        assert json.loads(choice.message.content or "")["a"] in ("x", "y")
    output: Any = {"format": {"type": "json_schema", "schema": schema}}
    message = messages_client.messages.create(
        model=server.base_model, max_tokens=200, messages=CHAT[1:], output_config=output
    )
    assert message.content[0].type == "text"
    assert json.loads(message.content[0].text)["a"] in ("x", "y")
    wrapped["json_schema"]["schema"] = {"not": {}}
    with pytest.raises(openai.BadRequestError, match="response_format: the schema"):
        client.chat.completions.create(**asked)


def test_anothers_weights_are_not_found(server: Server, path: str) -> None:
    key = KEYS[1]
    with (
        openai.OpenAI(base_url=f"{server.address}/oai/api/v1", api_key=key) as stranger,
        pytest.raises(openai.NotFoundError),
    ):
        stranger.completions.create(model=path, prompt="Hi")
    with (
        anthropic.Anthropic(base_url=f"{server.address}/anthropic/api", api_key=key) as stranger,
        pytest.raises(anthropic.NotFoundError),
    ):
        stranger.messages.create(model=path, max_tokens=1, messages=CHAT[1:])


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
