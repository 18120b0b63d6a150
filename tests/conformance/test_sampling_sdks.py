"""Sampling through the official SDKs, unmodified."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.running import NEWER_FIRST, SAMPLING, Facts, SamplingReport, Server, run_scenarios
from tests.support.proxies import LossyProxy

# Constants of the scenarios, which run under another SDK and are not imported here.
PROMPT, MAX_TOKENS, CROWD, RL_STEPS = [7, 8, 9, 10, 11], 8, 12, 2
EXACT = 1e-5
"""Tolerance of sampled log-probs against trained ones of the same tokens and weights, in fp32."""


def tokens(sequences: list[dict[str, Any]]) -> list[list[int]]:
    return [sequence["tokens"] for sequence in sequences]


# ---- Samples -------------------------------------------------------------------------------------


def test_a_seed_determines_every_token_and_every_bit(sampled: SamplingReport) -> None:
    facts = sampled.facts["sampled"]
    assert facts["first"] == facts["again"]
    assert facts["first"][:1] == facts["alone"]
    assert tokens(facts["first"]) != tokens(facts["other"])


def test_sequences_of_one_prompt_differ(sampled: SamplingReport) -> None:
    facts = sampled.facts["sampled"]
    assert len({tuple(row) for row in tokens(facts["first"])}) == 3
    assert tokens(facts["unseeded"][0]) != tokens(facts["unseeded"][1])


def test_every_sequence_has_a_unique_id(sampled: SamplingReport) -> None:
    ids = sampled.facts["sampled"]["ids"]
    assert len(set(ids)) == (1 if sampled.sdk == "0.22.0" else 3)


def test_a_sample_has_the_requested_length_and_a_logprob_per_token(sampled: SamplingReport, server: Server) -> None:
    facts = sampled.facts["sampled"]
    assert facts["base_model"] == server.base_model
    for sequence in facts["first"]:
        assert len(sequence["tokens"]) == len(sequence["logprobs"]) == MAX_TOKENS
        assert sequence["stop_reason"] == "length"


def test_a_choice_of_one_token_is_the_likeliest(sampled: SamplingReport) -> None:
    facts = sampled.facts["chosen"]
    greedy = tokens(facts["greedy"])
    assert greedy[0] == greedy[1]
    assert greedy == tokens(facts["top_k"]) == tokens(facts["top_p"])
    assert greedy != tokens(facts["hot"])


def test_logprobs_are_the_models_own_for_any_sampling_parameters(sampled: SamplingReport) -> None:
    facts = sampled.facts["chosen"]
    assert facts["greedy"] == facts["top_k"] == facts["top_p"]
    assert all(value < 0 for value in facts["greedy"][0]["logprobs"])


def test_the_likeliest_tokens_are_returned_with_their_logprobs(sampled: SamplingReport) -> None:
    if sampled.sdk == "0.22.0":
        return  # this SDK cannot request them
    facts = sampled.facts["chosen"]
    (greedy, _) = facts["greedy"]
    assert [row[0][0] for row in facts["topk"]] == greedy["tokens"]
    assert [row[0][1] for row in facts["topk"]] == greedy["logprobs"]
    assert all(len(row) == 3 for row in facts["topk"])


# ---- Stops ---------------------------------------------------------------------------------------


def test_a_stop_token_ends_the_sample_and_stays_in_it(sampled: SamplingReport) -> None:
    facts = sampled.facts["stopped"]
    stop = facts["free"][3]
    end = facts["free"].index(stop) + 1
    assert facts["token"]["tokens"] == facts["free"][:end]
    assert facts["token"]["stop_reason"] == "stop"


@pytest.mark.parametrize("form", ["string", "strings"])
def test_a_stop_string_ends_the_sample_where_it_is_complete(sampled: SamplingReport, form: str) -> None:
    facts = sampled.facts["stopped"]
    ended = facts[form]["tokens"]
    assert ended == facts["free"][: len(ended)]
    assert facts[form]["stop_reason"] == "stop"
    assert facts["text"] in facts["texts"][form]
    assert len(ended) < MAX_TOKENS


def test_an_empty_list_of_stops_stops_nowhere(sampled: SamplingReport) -> None:
    facts = sampled.facts["stopped"]
    assert facts["nowhere"]["tokens"] == facts["free"]
    assert facts["nowhere"]["stop_reason"] == "length"


def test_the_smallest_and_the_largest_samples_have_their_lengths(sampled: SamplingReport) -> None:
    facts = sampled.facts["stopped"]
    assert facts["empty"]["tokens"] == []
    assert facts["empty"]["stop_reason"] == "length"
    assert len(facts["one_token_prompt"]["tokens"]) == MAX_TOKENS
    assert len(facts["to_the_end"]["tokens"]) == 12  # a window of 512 tokens and a prompt of 500
    assert facts["to_the_end"]["stop_reason"] == "length"


# ---- Log-probs -----------------------------------------------------------------------------------


def test_sampled_logprobs_equal_the_trainers(sampled: SamplingReport) -> None:
    facts = sampled.facts["scored"]
    trained = facts["forward"][len(PROMPT) - 1 :]
    assert facts["sampled"] == pytest.approx(trained, abs=EXACT, rel=0)


def test_prompt_logprobs_equal_the_trainers(sampled: SamplingReport) -> None:
    facts = sampled.facts["scored"]
    assert facts["computed"][0] is None
    assert facts["computed"][1:] == pytest.approx(facts["forward"], abs=EXACT, rel=0)
    assert facts["prompt"] == facts["computed"]


def test_the_likeliest_prompt_tokens_include_likelier_alternatives(sampled: SamplingReport) -> None:
    facts = sampled.facts["scored"]
    assert facts["topk"][0] is None
    for row, logprob in zip(facts["topk"][1:], facts["prompt"][1:], strict=True):
        values = [value for _, value in row]
        assert values == sorted(values, reverse=True)
        assert len(values) == 4
        assert values[0] >= logprob


def test_chosen_tokens_and_the_last_positions_are_scored_alone(sampled: SamplingReport) -> None:
    if sampled.sdk == "0.22.0":
        return  # this SDK cannot request them
    facts = sampled.facts["scored"]
    assert all(row[1] == 0.0 for row in facts["targets"])  # -1 selects no token
    scored = [row[0] for row in facts["targets"]][-3:]
    assert scored == pytest.approx(facts["computed"][-3:], abs=EXACT, rel=0)
    assert facts["last"][:-3] == [None] * (len(facts["whole"]) - 3)
    assert facts["last"][-3:] == pytest.approx(facts["computed"][-3:], abs=EXACT, rel=0)
    assert facts["computed_last"][:-2] == [None] * (len(facts["whole"]) - 2)


# ---- Weights -------------------------------------------------------------------------------------


def test_a_sampler_keeps_its_results_while_its_run_trains_on(sampled: SamplingReport) -> None:
    facts = sampled.facts["saved"]
    assert facts["before"] == facts["own"] == facts["after"] == facts["own_after"]
    assert facts["moved"] == facts["newest"]
    assert facts["moved"] != facts["before"]


def test_saved_weights_have_a_path_and_a_base_model(sampled: SamplingReport, server: Server) -> None:
    facts = sampled.facts["saved"]
    path = f"tinker://{facts['run']}/sampler_weights/best"
    assert facts["paths"] == [path, path]
    assert facts["base_model"] == server.base_model


def test_a_seeded_sample_is_the_same_alone_and_under_load(sampled: SamplingReport) -> None:
    facts = sampled.facts["crowded"]
    assert facts["among"] == facts["alone"]
    assert len({str(each) for each in facts["alone"]}) == 4
    assert facts["lengths"] == [[n % 12 + 1] * (n % 3 + 1) for n in range(CROWD)]


def test_clones_sample_what_the_original_samples(sampled: SamplingReport) -> None:
    facts = sampled.facts["pickled"]
    assert facts["clones"] == [facts["original"]] * 2
    assert facts["original_again"] == facts["original"]


def test_a_cancelled_sample_delays_no_other(sampled: SamplingReport) -> None:
    facts = sampled.facts["cancelled"]
    assert (facts["was_cancelled"], facts["outcome"]) == (True, "cancelled")
    assert len(facts["next"][0]["tokens"]) == MAX_TOKENS


@pytest.mark.parametrize(
    ("what", "error", "named"),
    [
        ("too_long", "BadRequestError", "512"),
        ("token", "BadRequestError", "512"),
        ("empty", "BadRequestError", "prompt"),
        ("top_k", "BadRequestError", "top_k"),
        ("temperature", "BadRequestError", "temperature"),
        ("top_p", "BadRequestError", "top_p"),
        ("no_such_path", "NotFoundError", ""),
        ("no_path", "BadRequestError", "path"),
        ("no_model", "BadRequestError", "not served here"),
        ("foreign", "NotFoundError", ""),
    ],
)
def test_an_invalid_request_names_its_field_and_the_sampler_continues(
    sampled: SamplingReport, what: str, error: str, named: str
) -> None:
    facts = sampled.facts["refused"]
    assert facts[what]["error"] == error, facts[what]
    assert named in facts[what]["message"]
    assert facts["next"]


# ---- Load ----------------------------------------------------------------------------------------


def test_two_tenants_reinforce_concurrently_as_alone_bit_for_bit(sampled: SamplingReport) -> None:
    facts = sampled.facts["reinforced"]
    assert facts["together"] == facts["alone"]
    assert len({str(each) for each in facts["alone"]}) == 2


def test_a_reinforced_policy_equals_the_sampled_one(sampled: SamplingReport) -> None:
    for run in sampled.facts["reinforced"]["alone"]:
        assert len(run["steps"]) == RL_STEPS
        for step in run["steps"]:
            as_sampled = [value for row in step["sampled"] for value in row["logprobs"]]
            trained = [value for row in step["trained"] for value in row]
            assert as_sampled == pytest.approx(trained, abs=EXACT, rel=0)


def test_a_dropped_answer_changes_no_bit(sampled: SamplingReport, sampled_from_afar: tuple[LossyProxy, Facts]) -> None:
    proxy, facts = sampled_from_afar
    assert {"asample", "create_sampling_session", "retrieve_future"} <= set(proxy.lost)
    assert facts["undisturbed"] == sampled.facts["undisturbed"]


def test_a_dropped_answer_to_a_save_creates_no_second_sampler(sampled: SamplingReport, server: Server) -> None:
    # The SDK sends the save again under its seq_id, with another sampling_session_seq_id.
    with LossyProxy(server.address, {"save_weights_for_sampler"}) as proxy:
        facts = run_scenarios(sampled.sdk, proxy.address, server.base_model, ["undisturbed"], SAMPLING)
    assert proxy.lost == ["save_weights_for_sampler"]
    assert facts["undisturbed"] == sampled.facts["undisturbed"]


def test_the_newer_sdk_polls_in_batches(sampled: SamplingReport, sampled_from_afar: tuple[LossyProxy, Facts]) -> None:
    proxy, _ = sampled_from_afar
    assert ("retrieve_futures" in proxy.lost) == (sampled.sdk == "0.38.0")


@pytest.mark.parametrize("sdk", NEWER_FIRST)
def test_more_samples_than_the_queue_holds_all_return(sdk: str, narrow_server: Server) -> None:
    facts = run_scenarios(sdk, narrow_server.address, narrow_server.base_model, ["burst"], SAMPLING)
    assert [len(s["tokens"]) for s in facts["burst"]["sequences"]] == [MAX_TOKENS] * CROWD
