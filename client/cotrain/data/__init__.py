"""Chat data: conversations in JSONL, rendered by the tokenizer's own template to datums with exact masks.

from cotrain import data

rendered = data.render(data.read_chat("train.jsonl"), tokenizer, train_on="all_answers")
print(rendered.report.sentence())
print(data.marked(rendered.datums[0], tokenizer))
"""

from cotrain.data.conversations import Conversation, conversation_of, read_chat
from cotrain.data.rendering import Rendered, Report, render
from cotrain.data.view import marked

__all__ = [
    "Conversation", "Rendered", "Report", "conversation_of", "marked", "read_chat", "render",
]  # fmt: skip
