"""Chat data: masks by the template, exact to the token, and the counts of a rendering."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from cotrain import UnsupportedInput, data
from cotrain.learning_rates import constant, cosine, get_lr, linear
from tests.support.chat_model import chat_tokenizer

PLAIN = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello 12"},
    {"role": "user", "content": "More"},
    {"role": "assistant", "content": "No."},
]
ROW = {"messages": MESSAGES}


@pytest.fixture(scope="module")
def rewriting() -> PreTrainedTokenizerBase:
    """A tokenizer whose template writes the last answer otherwise than earlier ones."""
    return chat_tokenizer()


@pytest.fixture
def tokenizer(rewriting: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> PreTrainedTokenizerBase:
    monkeypatch.setattr(rewriting, "chat_template", PLAIN)
    return rewriting


def one(tokenizer: Any, row: Any = ROW, **options: Any) -> str:
    """Render one conversation to one datum and mark the trained parts."""
    [datum] = data.render([row], tokenizer, **options).datums
    return data.marked(datum, tokenizer)


def test_the_targets_are_the_next_tokens_and_answers_have_the_weight(tokenizer: Any) -> None:
    [datum] = data.render([ROW], tokenizer, train_on="all_answers").datums
    whole = tokenizer.apply_chat_template(MESSAGES, return_dict=True)["input_ids"]
    assert datum.model_input.to_ints() == whole[:-1]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == whole[1:]
    weighted = zip(whole[1:], datum.loss_fn_inputs["weights"].tolist(), strict=True)
    trained = [token for token, weight in weighted if weight]
    assert tokenizer.decode(trained) == "Hello 12<|im_end|>No.<|im_end|>"
    # The first trained token is predicted from exactly the tokens that a sampler would read.
    asked = tokenizer.apply_chat_template(MESSAGES[:2], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert datum.loss_fn_inputs["weights"].tolist().index(1.0) == len(asked) - 1


def test_the_parts_to_train_on_are_chosen(tokenizer: Any) -> None:
    assert one(tokenizer).endswith("assistant\nHello 12<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n"
                                   "<|im_start|>assistant\n⟦No.<|im_end|>⟧\n")  # fmt: skip
    assert one(tokenizer, train_on="all_answers").count("⟦") == 2
    weighted = one(tokenizer, prompt_weight=0.5)
    assert weighted.startswith("<|im_start|>⟦0.5: system\n")
    unwanted = [*MESSAGES[:2], {**MESSAGES[2], "weight": 0}, *MESSAGES[3:]]
    assert one(tokenizer, {"messages": unwanted}, train_on="all_answers").count("⟦") == 1
    each = data.render([ROW], tokenizer, train_on="each_answer").datums
    assert [data.marked(datum, tokenizer).split("⟦")[1] for datum in each] == [
        "Hello 12<|im_end|>⟧\n",
        "No.<|im_end|>⟧\n",
    ]


def test_a_last_answer_of_weight_0_is_not_trained_on(tokenizer: Any) -> None:
    unwanted = {"messages": [*MESSAGES[:4], {**MESSAGES[4], "weight": 0}]}
    with pytest.raises(UnsupportedInput, match="ends with an answer of weight 0"):
        one(tokenizer, unwanted)
    assert one(tokenizer, unwanted, train_on="all_answers").count("⟦") == 1


def test_a_template_that_rewrites_earlier_answers_is_refused_for_all_answers(rewriting: Any) -> None:
    with pytest.raises(UnsupportedInput, match=r"messages\[2\]: .*use train_on='each_answer'"):
        one(rewriting, train_on="all_answers")
    assert one(rewriting).endswith("⟦<think>\n\n</think>\n\nNo.<|im_end|>⟧\n")
    each = data.render([ROW], rewriting, train_on="each_answer").datums
    assert all("⟦<think>" in data.marked(datum, rewriting) for datum in each)


def test_an_answer_that_does_not_continue_the_prompt_is_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    monkeypatch.setattr(tokenizer, "chat_template", opening)
    with pytest.raises(UnsupportedInput, match=r"messages\[4\]: the answer does not continue.*think"):
        one(tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('only two roles') }}")
    with pytest.raises(UnsupportedInput, match="template refuses these messages: only two roles"):
        one(tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(UnsupportedInput, match="has no chat template"):
        one(tokenizer)


def test_tools_and_their_calls_are_rendered_as_objects(tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Call f"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "It is 2."},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    text = one(tokenizer, row, train_on="all_answers")
    assert '"function": {"name": "f"}' in text
    assert '⟦<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>⟧' in text
    assert "<|im_start|>tool\n2<|im_end|>" in text


def test_tools_that_the_template_leaves_out_are_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = [*MESSAGES[:2], {"role": "assistant", "tool_calls": [call]}]
    monkeypatch.setattr(tokenizer, "chat_template", re.sub(r"{% for [tc] .*?endfor %}", "", PLAIN, flags=re.DOTALL))
    with pytest.raises(UnsupportedInput, match=r"rows\[0\]: the chat template leaves out `tool_calls`"):
        one(tokenizer, {"messages": called})
    with pytest.raises(UnsupportedInput, match="leaves out `tools`"):
        one(tokenizer, {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]})
    assert one(tokenizer, {"messages": MESSAGES, "tools": []}).endswith("⟦No.<|im_end|>⟧\n")


def test_a_cut_is_counted_and_logged(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    whole = data.render([ROW], tokenizer, train_on="all_answers").report
    limit = whole.tokens - 8  # in the middle of the second question
    with pytest.raises(UnsupportedInput, match=f"has {whole.tokens} tokens, max_tokens is {limit}"):
        one(tokenizer, max_tokens=limit)
    with caplog.at_level(logging.WARNING, "cotrain"):
        cut = data.render([ROW], tokenizer, train_on="all_answers", max_tokens=limit, too_long="cut")
    assert (cut.report.cut, cut.report.cut_tokens, cut.report.tokens) == (1, 8, limit)
    assert "1 lost their end (8 tokens)" in caplog.text
    dropped = data.render([ROW], tokenizer, max_tokens=limit, too_long="cut").report
    assert (dropped.dropped, dropped.datums) == (1, 0)  # its only trained part was cut


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", r"chat.jsonl:2 is not JSON"),
        ('{"prompt": "a"}', r"chat.jsonl:2 has no list `messages`.*it has prompt"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no answer"),
        ('{"messages": [{"content": "a"}]}', r"messages\[0\] must be an object with a `role`"),
        ('{"messages": [{"role": "assistant"}]}', r"messages\[0\].content is missing"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "content must be text, not image_url"),
        ('{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}', r"\].weight must be 0 or 1, not 0.5"),
        ('{"messages": [{"role": "assistant", "content": "a", "weight": NaN}]}', "weight must be 0 or 1, not nan"),
        ('{"messages": ["\xff"]}', r"chat.jsonl:2 is not JSON: 'utf-8' codec"),
    ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_bytes(f"{json.dumps(ROW)}\n{line}\n".encode("latin-1"))
    with pytest.raises(UnsupportedInput, match=reason):
        data.read_chat(file)


def test_a_file_of_windows_is_read(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_bytes(f"{json.dumps(ROW)}\r\n\r\n".encode("utf-8-sig"))
    [conversation] = data.read_chat(tmp_path / "chat.jsonl")
    assert list(conversation.messages) == MESSAGES


def test_refused_conversations_are_counted_or_raise(tokenizer: Any) -> None:
    bad = {"messages": MESSAGES[:4]}
    with pytest.raises(UnsupportedInput, match=r"rows\[1\] ends with a message of 'user'"):
        data.render([ROW, bad], tokenizer)
    report = data.render([ROW, bad], tokenizer, on_refused="skip").report
    assert (report.conversations, report.datums, len(report.refused)) == (2, 1, 1)
    with pytest.raises(UnsupportedInput, match="train_on is one of last_answer"):
        data.render([ROW], tokenizer, train_on="user")  # type: ignore[arg-type]


def test_learning_rates_follow_the_published_rule(tmp_path: Path) -> None:
    # 5e-4 * (2000 / hidden size) ** exponent
    assert get_lr("Qwen/Qwen3-8B") == pytest.approx(4.7298e-4, rel=1e-4)
    assert get_lr("meta-llama/Llama-3.1-8B-Instruct", rank=8) == pytest.approx(2.8564e-4, rel=1e-4)
    assert get_lr("Qwen/Qwen3-8B", alpha=64) == get_lr("Qwen/Qwen3-8B") / 2
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 2000}')
    assert get_lr(str(tmp_path)) == 5e-4
    assert get_lr("Qwen/Qwen9-1B", hidden_size=2000) == 5e-4
    for model, reason in (("google/gemma-2-2b", "around 0.0005"), ("Qwen/Qwen9-1B", "hidden_size")):
        with pytest.raises(UnsupportedInput, match=reason):
            get_lr(model)


def test_schedules_begin_after_a_warmup_and_end_at_the_least() -> None:
    assert [constant(step, 4, warmup=2) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert [linear(step, 6, warmup=2, least=0.2) for step in range(6)] == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4])
    assert [cosine(step, 4) for step in range(4)] == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466])
    with pytest.raises(UnsupportedInput, match="step is 4, steps 4"):
        cosine(4, 4)
