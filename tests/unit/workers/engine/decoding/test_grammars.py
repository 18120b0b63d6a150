"""Text held to a grammar: every sample keeps it, and nothing else changes."""

from __future__ import annotations

import json
import string
from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cotrain_workers.engine.decoding.decoder import EngineDecoder
from cotrain_workers.engine.decoding.requests import SampleOutput, SampleRequest
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Failure, HostWeights
from cotrain_workers.sampling.tokenizer import Grammars
from tests.support.decoding import VOCAB, request, text

EOS = 0
LETTERS = string.digits + string.ascii_letters + string.punctuation
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["kind", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMAR = f"start: %json {json.dumps(SCHEMA)}"
PROMPT = [5, 6, 7]


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens are an end of sequence and single characters."""
    vocabulary = {"<end>": EOS} | {letter: at for at, letter in enumerate(LETTERS, 1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


_NO_WEIGHTS: dict[str, HostWeights] = {}
TOKENIZER = byte_tokenizer()


@pytest.fixture
def decoder(new_engine: Callable[..., Engine]) -> EngineDecoder:
    return new_engine().decoder(
        _NO_WEIGHTS.__getitem__, kv_tokens=4096, text=text, page_tokens=16, step_tokens=64,
        grammar_of=Grammars(TOKENIZER.to_str()),
    )  # fmt: skip


def outputs(decoder: EngineDecoder, *requests: SampleRequest) -> dict[str, SampleOutput | Failure]:
    for each in requests:
        assert decoder.refuse(each) is None
        decoder.add(each)
    found: dict[str, SampleOutput | Failure] = {}
    while decoder.busy:
        found |= dict(decoder.step().finished)
    return found


def held(name: str, count: int, grammar: str = GRAMMAR) -> SampleRequest:
    stop = frozenset({EOS})
    return request(name, PROMPT, grammar=grammar, num_samples=count, max_tokens=80, stop_tokens=stop)


def test_two_hundred_random_samples_keep_a_schema(decoder: EngineDecoder) -> None:
    found = outputs(decoder, held("held", 200))["held"]
    assert isinstance(found, SampleOutput)
    texts = set()
    for sequence in found.sequences:
        assert (sequence.stop_reason, sequence.tokens[-1]) == ("stop", EOS)
        texts.add(said := TOKENIZER.decode(sequence.tokens[:-1].tolist()))
        value = json.loads(said)
        assert set(value) <= {"kind", "age", "tags"}
        assert value["kind"] in ("cat", "dog")
        assert type(value["age"]) is int
        assert 0 <= value["age"] <= 30
        tags = value.get("tags", [])
        assert len(tags) <= 2
        assert all(isinstance(tag, str) and len(tag) <= 3 for tag in tags)
    assert len(texts) > 50


def test_log_probs_are_those_of_the_raw_model(decoder: EngineDecoder) -> None:
    found = outputs(decoder, held("held", 1))["held"]
    assert isinstance(found, SampleOutput)
    tokens = found.sequences[0].tokens
    again = request("again", [*PROMPT, *tokens], max_tokens=0, prompt_logprobs=True)
    scored = outputs(decoder, again)["again"]
    assert isinstance(scored, SampleOutput)
    assert scored.prompt_logprobs is not None
    raw = scored.prompt_logprobs[len(PROMPT) :]
    np.testing.assert_allclose(found.sequences[0].logprobs, raw, atol=1e-5)


def test_a_request_without_a_grammar_keeps_its_bits_among_others(decoder: EngineDecoder) -> None:
    free = request("free", [9, 8, 7], num_samples=2, topk_sample_logprobs=3)
    alone, among = (outputs(decoder, free, *others)["free"] for others in ((), (held("held", 3),)))
    assert isinstance(alone, SampleOutput)
    assert isinstance(among, SampleOutput)
    for one, other in zip(alone.sequences, among.sequences, strict=True):
        assert one.tokens.tobytes() == other.tokens.tobytes()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


def test_a_greedy_sample_keeps_the_schema(decoder: EngineDecoder) -> None:
    greedy = request("g", PROMPT, grammar=GRAMMAR, temperature=0.0, max_tokens=80, stop_tokens=frozenset({EOS}))
    found = outputs(decoder, greedy)["g"]
    assert isinstance(found, SampleOutput)
    assert json.loads(TOKENIZER.decode(found.sequences[0].tokens[:-1].tolist()))["kind"]


def test_a_text_that_exceeds_a_limit_of_the_grammar_fails_with_the_reason(decoder: EngineDecoder) -> None:
    fields = {f"field{at}": {"type": "string"} for at in range(600)}
    wide = f"start: %json {json.dumps({'type': 'object', 'properties': fields})}"
    found = outputs(decoder, held("wide", 1, wide), held("held", 1))
    failure = found["wide"]
    assert isinstance(failure, Failure)
    assert "too complex for the text so far" in failure.message
    assert isinstance(found["held"], SampleOutput)


BAD = ["start: %json {", "start: nothing", 'start: %json {"not": {}}', 'start: %json {"$ref": "#"}']


@pytest.mark.parametrize("grammar", BAD)
def test_an_invalid_grammar_is_refused(decoder: EngineDecoder, grammar: str) -> None:
    assert "response_format" in str(decoder.refuse(held("bad", 1, grammar)))


def test_the_vocabulary_may_be_larger_than_the_tokenizer() -> None:
    assert TOKENIZER.get_vocab_size() < VOCAB


def test_overlapping_steps_keep_a_grammar(decoder: EngineDecoder) -> None:
    free = request("free", [9, 8, 7], max_tokens=40)
    plain = outputs(decoder, held("held", 3), free)
    decoder.overlaps = True
    overlapping = outputs(decoder, free, held("held", 3))
    for name, found in plain.items():
        other = overlapping[name]
        assert isinstance(found, SampleOutput)
        assert isinstance(other, SampleOutput)
        tokens = [sequence.tokens.tolist() for sequence in found.sequences]
        assert tokens == [sequence.tokens.tolist() for sequence in other.sequences]
