"""`mint` 0.2.0, unmodified, with an `sk-` key: the ordinary loop and both of its extensions."""

from __future__ import annotations

import pytest

from tests.conformance.running import MINT_KEY, ROOT, SDKS, Facts, Server, run_scenarios

SCENARIOS = ("loop", "not_a_number", "distilled", "referred", "refused", "interpolated")
PINNED = "0.22.0"  # the SDK that mint 0.2.0 asks for
MINT = ROOT / ".sdk" / "mindlab-toolkit-0.2.0"


@pytest.fixture(scope="package")
def facts(server: Server) -> Facts:
    """Run every scenario of `mint`."""
    if not MINT.is_dir():
        pytest.fail("mint is missing: run tests/conformance/sdks.sh")
    return run_scenarios(
        *(PINNED, server.address, server.base_model, SCENARIOS, "mint_scenarios"),
        PYTHONPATH=f"{MINT}:{SDKS[PINNED]}",
        MINT_API_KEY=MINT_KEY,
        MINT_BASE_URL=server.address,
    )


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def test_the_ordinary_loop_trains_saves_and_samples(facts: Facts) -> None:
    loop = facts["loop"]
    assert loop["path"].endswith("/sampler_weights/taught")
    assert loop["tokens"] == [21, 22, 23]
    assert loop["restored"] == loop["scores"]


def test_a_nan_fails_its_request_and_the_run_goes_on(facts: Facts) -> None:
    said = facts["not_a_number"]["said"]
    assert "RequestFailedError" in said
    assert "data[0].loss_fn_inputs.weights[0] is not finite" in said
    assert facts["not_a_number"]["next_loss"] > 0


def test_distillation_closes_in_on_the_teacher(facts: Facts) -> None:
    means = [metrics["reverse_kl:mean"] for metrics in facts["distilled"]["metrics"]]
    assert means[-1] < 0.25 * means[0]


def test_each_datum_has_the_sum_of_its_loss(facts: Facts) -> None:
    distilled = facts["distilled"]
    assert distilled["shapes"] == [[1], [1]]
    for losses, metrics in zip(distilled["losses"], distilled["metrics"], strict=True):
        assert sum(flat(losses)) == pytest.approx(metrics["loss:sum"], rel=1e-6)
        assert metrics["loss:mean"] == metrics["loss:sum"] / 6
        assert (metrics["num_samples:sum"], metrics["num_tokens:sum"]) == (2.0, 6.0)


def test_it_takes_its_place_in_the_clock_cycles(facts: Facts) -> None:
    cycles = [metrics["clock_cycle:unique"] for metrics in facts["distilled"]["metrics"]]
    assert cycles == sorted(set(cycles))


def test_a_run_is_no_distance_from_itself_and_some_from_its_base_model(facts: Facts) -> None:
    referred = facts["referred"]
    assert referred["itself"]["loss:sum"] == 0.0
    assert referred["base"]["loss:sum"] > 0.1


def test_heat_makes_distributions_alike(facts: Facts) -> None:
    referred = facts["referred"]
    assert 0 < referred["hot"]["loss:sum"] < 1e-2 * referred["base"]["loss:sum"]


def test_a_number_from_the_client_changes_nothing_but_the_place(facts: Facts) -> None:
    base, numbered = (dict(facts["referred"][name]) for name in ("base", "numbered"))
    assert base.pop("clock_cycle:unique") < numbered.pop("clock_cycle:unique")
    assert base == numbered


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("unknown", "reference_model_path: Checkpoint not found."),
        ("foreign scheme", "'mint://teacher-step-0010' is neither a tinker:// path nor"),
        ("temperature", "temperature must be positive and finite."),
        ("empty", "data is empty; send at least one datum."),
        ("no sources", "source_paths must have 1 to 64 entries."),
        ("counts", "coefficients has 2 entries for 1 sources."),
        ("output", "output_path must be a plain name"),
        ("no source", "Checkpoint not found."),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(facts: Facts, what: str, said: str) -> None:
    assert said in facts["refused"][what]


def test_a_run_goes_on_after_what_was_refused(facts: Facts) -> None:
    assert facts["refused"]["still"] == 2.0


def test_an_interpolation_is_answered_as_mint_reads_it(facts: Facts) -> None:
    answer, sources = facts["interpolated"]["answer"], facts["interpolated"]["sources"]
    path = answer.pop("path")
    assert path.endswith(":train:0/sampler_weights/ema-0001")
    assert path not in sources
    assert answer == {
        "checkpoint_type": "sampler",
        "source_paths": sources,
        "coefficients": [0.9, 0.1],
        "has_rank_shards": False,
        "type": "mint_interpolate_checkpoints",
    }


def test_an_interpolation_can_be_interpolated_again(facts: Facts) -> None:
    assert facts["interpolated"]["again"].endswith("/sampler_weights/interpolated")
    one, other, _, again = map(flat, facts["interpolated"]["scores"])
    assert again not in (one, other)


def test_one_source_alone_scores_as_itself(facts: Facts) -> None:
    assert facts["interpolated"]["alone"] == facts["interpolated"]["scores"][0]
