"""Requests of Anthropic's clients: converted to a sample request, or refused by the name of the field."""

from typing import Any

import pytest
from pydantic import ValidationError

from cotrain_server.errors import Invalid
from cotrain_server.text_apis.anthropic_requests import MessageRequest

USER = {"role": "user", "content": "Hi"}


def message(**fields: Any) -> MessageRequest:
    asked = {"model": "m", "max_tokens": 5, "messages": [USER], **fields}
    return MessageRequest.model_validate(asked)


def test_fields_are_copied_to_the_sample_request() -> None:
    asked = message(stop_sequences=["x"], temperature=0.5, top_k=3, top_p=0.9, stream=True)
    body = asked.body([1, 2])
    assert (body.prompt, body.num_samples, body.max_tokens, body.stop) == ((1, 2), 1, 5, ("x",))
    assert (body.temperature, body.top_k, body.top_p, body.stream) == (0.5, 3, 0.9, True)
    assert message().body([1]).stop is None


def test_max_tokens_of_a_message_is_required() -> None:
    with pytest.raises(ValidationError, match="max_tokens"):
        MessageRequest.model_validate({"model": "m", "messages": [USER]})


def test_successive_messages_of_one_role_are_joined() -> None:
    block = {"type": "text", "text": "there", "cache_control": {"type": "ephemeral"}}
    asked = message(
        system=[{"type": "text", "text": "Be short."}],
        messages=[USER, {"role": "user", "content": [block]}, {"role": "assistant", "content": "A"}],
    )
    assert asked.template_messages() == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi\nthere"},
        {"role": "assistant", "content": "A"},
    ]
    assert asked.chat().continues
    assert not message().chat().continues


@pytest.mark.parametrize("fields", [{"output_config": {"effort": "low"}}, {"container": "c"}, {"nobody_knows_this": 1}])
def test_a_field_that_would_change_the_result_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match=next(iter(fields))):
        message(**fields).check()


def test_a_field_without_effect_is_ignored() -> None:
    message(
        metadata={"user_id": "x"}, service_tier="auto", tools=[], thinking={"type": "disabled"},
        tool_choice={"type": "auto"}, cache_control={"type": "ephemeral"},
    ).check()  # fmt: skip


def test_an_image_is_refused_by_its_index() -> None:
    asked = message(messages=[{"role": "user", "content": [{"type": "image"}]}])
    with pytest.raises(Invalid, match=r"messages\[0\].content\[0\]: .*'image'"):
        asked.template_messages()
