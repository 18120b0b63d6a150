"""Answers of all text APIs."""

from cotrain_server.text_apis.answers import event


def test_an_event_is_one_line_of_data() -> None:
    assert event({"text": "a\nb"}, "ping") == 'event: ping\ndata: {"text":"a\\nb"}\n\n'
