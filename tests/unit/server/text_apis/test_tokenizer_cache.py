"""Cache of tokenizers: each is read once, and again when its worker has rewritten it.

Text that grows token by token, without partial characters, up to a stop string.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from cotrain_server.errors import Invalid, Unreadable
from cotrain_server.settings import ServerSettings
from cotrain_server.text_apis.token_texts import TokenTexts, VisibleText
from cotrain_server.text_apis.tokenizer import TextGrowth, Tokenizer
from cotrain_server.text_apis.tokenizer_cache import language_of
from tests.support.draws import examples
from tests.support.http_api import POOL
from tests.support.talking import write_language
from tests.support.tiny_tokenizers import sentencepiece_tokenizer, trained_tokenizer

#: Replacement for bytes of incomplete characters.
PARTIAL = "\N{REPLACEMENT CHARACTER}"


async def test_a_tokenizer_is_read_once_until_it_is_rewritten(tmp_path: Path) -> None:
    write_language(tmp_path)
    language = await language_of(POOL, ServerSettings(redis_url="unix:///nowhere", data_dir=tmp_path))
    assert await language_of(POOL, ServerSettings(redis_url="unix:///nowhere", data_dir=tmp_path)) is language
    write_language(tmp_path, None)
    os.utime(tmp_path / "tokenizers" / POOL.tokenizer / "tokenizer.json", ns=(1, 1))
    renewed = await language_of(POOL, ServerSettings(redis_url="unix:///nowhere", data_dir=tmp_path))
    assert language.template is not None
    assert renewed.template is None


@pytest.mark.parametrize("folder", ["", "elsewhere"])
async def test_a_pool_without_a_tokenizer_file_has_none(tmp_path: Path, folder: str) -> None:
    with pytest.raises(Invalid, match="no tokenizer"):
        await language_of(
            replace(POOL, tokenizer=folder), ServerSettings(redis_url="unix:///nowhere", data_dir=tmp_path)
        )


VOCAB = 512
EOS = 2
WORDS = "Grüße 🙂 漢字 👩‍👩‍👧 def f(x):\n    return x  # ok"

byte_level = tokenizers.Tokenizer.from_str(trained_tokenizer(VOCAB))
tokenizer = Tokenizer(byte_level)
llama2, gemma = (
    tokenizers.Tokenizer.from_str(sentencepiece_tokenizer(VOCAB, strips=strips)) for strips in (True, False)
)
metaspace = tokenizers.Tokenizer.from_str(sentencepiece_tokenizer(VOCAB, strips=True))
metaspace.decoder = decoders.Metaspace()
BYTE = 3
"""Token id of byte 0 in a fallback vocabulary."""
VOCABULARIES = {
    "byte level": tokenizer,
    "llama 2": Tokenizer(llama2),
    "gemma": Tokenizer(gemma),
    "metaspace": Tokenizer(metaspace),
}
#: Characters of one to four bytes, joined ones, right-to-left ones, and spaces of SentencePiece.
SCRIPTS = [
    "a b",
    "  x",
    "é",
    "Ж",
    "한글",
    "가나다라마바사아자차카타",
    "漢字",
    "ไทย",
    "שלום",
    "🙂",
    "👩‍👩‍👧",
    "€😀",
    "\n",
    "▁",
]

every_vocabulary = pytest.mark.parametrize("name", VOCABULARIES)


@st.composite
def sampled_tokens(draw: st.DrawFn, name: str) -> list[int]:
    """Draw possible samples of a model: text of several scripts, control tokens and random tokens."""
    text = st.lists(st.sampled_from(SCRIPTS), min_size=1, max_size=6).map("".join)
    encoded = text.map(lambda each: VOCABULARIES[name].encode(each, special=False))
    by_chance = st.lists(st.integers(0, VOCAB + 2), min_size=1, max_size=4)
    return [token for row in draw(st.lists(encoded | by_chance, max_size=6)) for token in row]


def texts_of(tokens: Sequence[int], size: int, language: Tokenizer = tokenizer) -> list[str]:
    growth = TextGrowth(language)
    texts = [growth.push(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    return [*texts, growth.finish()]


@every_vocabulary
@settings(max_examples=examples(60))
@given(data=st.data(), size=st.integers(1, 9))
def test_chunks_add_up_to_the_whole_text(name: str, data: st.DataObject, size: int) -> None:
    language, tokens = VOCABULARIES[name], data.draw(sampled_tokens(name))
    texts = texts_of(tokens, size, language)
    assert language.without_first_space("".join(texts)) == language.decode(tokens)
    assert "".join(texts) == "".join(texts_of(tokens, len(tokens) or 1, language))


@every_vocabulary
@settings(max_examples=examples(60))
@given(data=st.data())
def test_a_text_equals_that_of_the_tokenizers_library(name: str, data: st.DataObject) -> None:
    language, tokens = VOCABULARIES[name], data.draw(sampled_tokens(name))
    library = {"llama 2": llama2, "gemma": gemma, "metaspace": metaspace}.get(name)
    whole = (library or byte_level).decode(tokens)
    # There, one invalid byte spoils a whole sequence of byte tokens. Here it spoils none.
    if library is None or PARTIAL not in whole:
        assert language.decode(tokens) == whole


@every_vocabulary
@settings(max_examples=examples(60))
@given(data=st.data())
def test_texts_and_bytes_of_single_tokens_add_up_to_the_text(name: str, data: st.DataObject) -> None:
    language, (prompt, tokens) = VOCABULARIES[name], (data.draw(sampled_tokens(name)) for _ in "12")
    begins = data.draw(st.booleans())
    visible = VisibleText(language, [], [EOS], before=prompt, begins=begins)
    text = "".join(visible.push([token]) for token in tokens) + visible.finish()
    texts = TokenTexts(language, [EOS], prompt, begins=begins)
    parts = texts.with_rest(texts.of_answer(tokens))
    if parts:
        assert "".join(part.text for part in parts) == text
    assert [part.offset for part in parts] == [
        len("".join(part.text for part in parts[:at])) for at in range(len(parts))
    ]
    if not language.last_with_text(prompt):
        assert b"".join(part.content for part in parts).decode(errors="replace") == text


@pytest.mark.parametrize("name", ["byte level", "llama 2", "gemma"])
@pytest.mark.parametrize("text", [WORDS, WORDS * 20, "가나다라마바사아자차카타", "€😀" * 14])
def test_a_character_of_many_tokens_is_never_split(name: str, text: str) -> None:
    language = VOCABULARIES[name]
    texts = texts_of(language.encode(text, special=False), 1, language)
    assert not any(PARTIAL in each for each in texts)
    assert language.without_first_space("".join(texts)) == text
    assert sum(map(bool, texts)) > 10


def test_bytes_of_a_fallback_vocabulary_become_characters() -> None:
    growth = TextGrowth(VOCABULARIES["gemma"])
    texts = [growth.push([BYTE + byte]) for byte in "aé🙂b".encode()]
    assert texts == ["a", "", "é", "", "", "", "🙂", "b"]


def test_an_invalid_byte_spoils_no_neighbouring_character() -> None:
    tokens = [BYTE + byte for byte in "가".encode() + b"\xff" + "나".encode() + b"\xeb"]
    assert VOCABULARIES["llama 2"].decode(tokens) == f"가{PARTIAL}나{PARTIAL}"


def test_each_token_is_decoded_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    text_behind = Tokenizer.text_behind

    def counted(self: Tokenizer, before: list[int], tokens: Sequence[int]) -> str:
        decoded.append(len(before) + len(tokens))
        return text_behind(self, before, tokens)

    monkeypatch.setattr(Tokenizer, "text_behind", counted)
    language = VOCABULARIES["llama 2"]
    tokens = language.encode("one 가나다라 two " * 300, special=False)
    texts_of([*tokens, *[BYTE + 0xFF] * 1000], 1, language)
    assert sum(decoded) <= 2 * len(tokens)


@pytest.mark.parametrize("name", ["llama 2", "metaspace"])
def test_a_text_after_another_keeps_its_first_space(name: str) -> None:
    language = VOCABULARIES[name]
    prompt, words = language.encode("Once", special=True), language.encode("upon", special=False)
    behind = VisibleText(language, [" u"], [], before=prompt)
    assert behind.push(words) == ""
    assert behind.stopped_by == " u"
    begun = VisibleText(language, [], [], before=prompt, begins=True)
    assert begun.push(words) + begun.finish() == "upon"


def test_an_answer_completes_a_character_begun_by_its_prompt() -> None:
    first, *rest = (BYTE + byte for byte in "가".encode())
    visible = VisibleText(VOCABULARIES["gemma"], [], [], before=[first])
    assert visible.push(rest) == "가"


def test_invalid_bytes_are_not_held_back_without_limit() -> None:
    (stray,) = tokenizer.encode("é", special=False)[-1:]
    growth = TextGrowth(tokenizer)
    text = "".join(growth.push([stray]) for _ in range(100))
    assert len(text) > 60
    assert len(text + growth.finish()) == 100


def test_a_stop_string_across_tokens_is_never_shown() -> None:
    stop = "f(x):\n"
    assert len(tokenizer.encode(stop, special=False)) > 2
    visible = VisibleText(tokenizer, ["END", stop], [EOS])
    shown = [visible.push([token]) for token in tokenizer.encode(WORDS, special=False)]
    assert "".join(shown) + visible.finish() == WORDS[: WORDS.index(stop)]
    assert visible.stopped_by == stop


def test_the_first_of_two_stop_strings_ends_the_text() -> None:
    visible = VisibleText(tokenizer, ["b", "a b"], [])
    assert visible.push(tokenizer.encode("x a b", special=False)) == "x "
    assert visible.stopped_by == "a b"
    assert visible.push([5]) + visible.finish() == ""


def test_a_partial_stop_string_is_shown_at_the_end() -> None:
    visible = VisibleText(tokenizer, ["END."], [])
    shown = visible.push(tokenizer.encode("THE END", special=False))
    assert shown == "THE "
    assert visible.finish() == "END"
    assert visible.stopped_by is None


def test_a_final_token_has_no_text() -> None:
    (letter,) = tokenizer.encode("a", special=False)
    visible = VisibleText(tokenizer, [], [letter])
    assert visible.push(tokenizer.encode("xa", special=False)) + visible.finish() == "x"


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(Unreadable, match="half of a surrogate pair"):
        tokenizer.encode(json.loads('"\\ud83d"'), special=False)


def test_truncation_and_padding_settings_of_the_file_are_ignored(tmp_path: Path) -> None:
    vocabulary = tokenizers.Tokenizer.from_str(trained_tokenizer(VOCAB))
    vocabulary.enable_truncation(3)
    vocabulary.enable_padding(length=500)
    vocabulary.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode(WORDS, special=True) == tokenizer.encode(WORDS, special=True)
