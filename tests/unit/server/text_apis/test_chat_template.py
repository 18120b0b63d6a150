"""Chat templates: rendered and tokenized as in `transformers`, within limits."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from jinja2 import TemplateSyntaxError

from cotrain_server.errors import Invalid
from cotrain_server.text_apis import chat_template as chat
from cotrain_server.text_apis.chat_template import ChatTemplate, Message
from cotrain_server.text_apis.tokenizer import Tokenizer
from tests.support.tiny_models import CHAT_TEMPLATE
from tests.support.tiny_tokenizers import SPECIAL_TOKENS, trained_tokenizer

LLAMA2 = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}\
{% set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message.role == 'user' %}
        {{- '[INST] ' + (('<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n') if loop.first and system is defined else '') -}}
        {{- message['content'].strip() + ' [/INST]' }}
    {% else %}
        {{- ' ' + message['content'].strip() + ' ' + eos_token }}
    {% endif %}
{% endfor %}"""
QWEN3_LIKE = """{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}{% if ns.last < 0 and message.role == 'user' %}\
{% set ns.last = messages|length - 1 - loop.index0 %}{% endif %}{%- endfor %}
{%- if tools %}never{% endif %}
{%- for message in messages %}
    {%- if message.content is not string %}{% continue %}{% endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content ~ '<|im_end|>' }}{% endgeneration %}
    {%- else %}{{ message | tojson(indent=1) }}<|im_end|>{% endif %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>' }}{% endif %}{% endif %}
{{- strftime_now('%Y') }}"""
TEMPLATES = {"chatml": CHAT_TEMPLATE, "llama2": LLAMA2, "qwen3": QWEN3_LIKE}
CHATS: list[list[Message]] = [
    [{"role": "user", "content": "Hi <b>&</b> 'you' 🙂"}],
    [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": " What is this?\n<|im_end|>"},
        {"role": "assistant", "content": "A test. "},
        {"role": "user", "content": "Grüße"},
    ],
]


def folder_of(path: Path, template: str) -> Any:
    """Write a tokenizer as a worker does. Return the tokenizer of `transformers`."""
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(trained_tokenizer(512)),
        bos_token=transformers.AddedToken("<s>", special=True),
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[0],
        additional_special_tokens=[SPECIAL_TOKENS[1]],
        add_bos_token=False,
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return tokenizer


def loaded(path: Path) -> ChatTemplate:
    template = ChatTemplate.load(path)
    assert template is not None
    return template


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_a_chat_has_the_tokens_of_transformers(
    tmp_path: Path, name: str, messages: list[Message], options: dict[str, Any]
) -> None:
    judge = folder_of(tmp_path, TEMPLATES[name])
    expected = judge.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
    text = loaded(tmp_path).render(messages, options)
    assert Tokenizer.load(tmp_path).encode(text, special=False) == expected


@pytest.mark.parametrize("content", ["Certainly:", "spaced at the end "])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_last_message_is_continued_as_in_transformers(tmp_path: Path, name: str, content: str) -> None:
    judge = folder_of(tmp_path, TEMPLATES[name])
    messages = [*CHATS[0], {"role": "assistant", "content": content}]
    expected = judge.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    assert loaded(tmp_path).render(messages, continue_final=True) == expected


def test_an_error_of_a_template_is_passed_on_in_its_own_words(tmp_path: Path) -> None:
    folder_of(tmp_path, LLAMA2)
    with pytest.raises(Invalid, match=r"messages: .*Roles must alternate"):
        loaded(tmp_path).render([CHATS[0][0], CHATS[0][0]])


def test_a_template_that_drops_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(Invalid, match="cannot continue"):
        ChatTemplate("nothing", {}).render(CHATS[0], continue_final=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ missing.name }}",
        "{{ 1 // 0 }}",
        "{{ messages + 1 }}",
        "{% for a in range(10 ** 9) %}x{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_can_neither_leave_its_sandbox_nor_block_the_server(source: str) -> None:
    with pytest.raises(Invalid, match="chat template"):
        ChatTemplate(source, {}).render(CHATS[0])


def test_a_template_that_writes_too_much_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_RENDERED_CHARACTERS", 10)
    with pytest.raises(Invalid, match="is too long"):
        ChatTemplate("{% for a in range(99) %}{{ a }} {% endfor %}", {}).render(CHATS[0])


def test_a_template_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_RENDER_S", -1.0)
    with pytest.raises(Invalid, match="is too long"):
        ChatTemplate("x", {}).render(CHATS[0])


def test_a_folder_without_a_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None


def test_a_broken_template_is_distinguished_from_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    with pytest.raises(TemplateSyntaxError):
        ChatTemplate.load(tmp_path)
