"""Verdicts are functions of numbers: each is shown numbers that hold, that fail, and that cannot tell."""

from __future__ import annotations

import numpy as np
import pytest

from shufflerl.arrays import FloatArray
from shufflerl.experiments.claims import Claim, Outcome, Verdict, from_some_k, lower, number, spread, together, within
from shufflerl.experiments.compare import interval
from shufflerl.experiments.figures.messages import shrinks
from shufflerl.experiments.figures.noise import comparable, growth, private
from shufflerl.experiments.figures.spectrum import good
from shufflerl.experiments.figures.suite import nowhere_worse, times_over
from shufflerl.experiments.figures.switches import at_most, every_episode, fewer
from shufflerl.experiments.figures.theorem import affordable, flat, learns
from shufflerl.experiments.suite import Contest, Line, Report
from shufflerl.noise import GaussianNoise

KS = [10**power for power in range(3, 9)]


def around(mean: float, sd: float = 1.0, draw: int = 0) -> FloatArray:
    """Twenty values of exactly this mean; two draws are independent."""
    values = np.random.default_rng(draw).standard_normal(20)
    return np.asarray(mean + sd * (values - values.mean()))


def constant(*values: float) -> list[FloatArray]:
    return [np.full(3, value) for value in values]


def test_lower_needs_the_whole_interval() -> None:
    assert lower(around(10, 1, 1), around(20, 1, 2)).verdict is Verdict.HOLDS
    assert lower(around(20, 1, 1), around(10, 1, 2)).verdict is Verdict.NOT_HERE
    cannot_tell = lower(around(10, 30, 1), around(12, 30, 2))
    assert cannot_tell.verdict is Verdict.OPEN
    assert lower(np.array([1.0]), np.array([2.0])).verdict is Verdict.OPEN, "one seed shows nothing"
    assert lower(np.array([2.0, 2.0]), np.array([2.0, 2.0])).verdict is Verdict.NOT_HERE, "equal is not below"


def test_lower_is_paired_by_seed() -> None:
    hard = around(0, 100)  # some seeds are hard for both
    assert lower(hard + around(-1, 0.1, 1), hard).verdict is Verdict.HOLDS
    assert lower(hard + around(-1, 0.1, 1), hard[::-1]).verdict is Verdict.OPEN


def test_lower_says_the_means_and_the_difference() -> None:
    said = lower(np.array([1.0, 1.0, 1.0]), np.array([3.0, 3.0, 3.0])).numbers
    assert said == "1 against 3; difference -2"


def test_within_a_factor_in_both_directions() -> None:
    assert within(around(12, 0.1, 1), 1.25, around(10, 0.1, 2)).verdict is Verdict.HOLDS
    assert within(around(13, 0.1, 1), 1.25, around(10, 0.1, 2)).verdict is Verdict.NOT_HERE
    assert within(around(12.4, 5, 1), 1.25, around(10, 5, 2)).verdict is Verdict.OPEN, "the interval reaches beyond"
    assert within(np.full(3, 12.5), 1.25, np.full(3, 10.0)).verdict is Verdict.HOLDS, "just as much is within"
    said = within(np.full(3, 12.0), 1.25, np.full(3, 10.0)).numbers
    assert said == "12 against 10: 1.2 times as much; exceeds the bound by -0.5"


def test_together_all_must_hold_and_the_failing_are_named() -> None:
    good, bad = Outcome(Verdict.HOLDS, "1"), Outcome(Verdict.NOT_HERE, "2")
    assert together([("a", good), ("b", good)]) == Outcome(Verdict.HOLDS, "a: 1; b: 1")
    assert together([("a", good), ("b", bad)]) == Outcome(Verdict.NOT_HERE, "Not for b. All: a: 1; b: 2")
    assert together([("a", bad)]).verdict is Verdict.NOT_HERE
    unsure = Outcome(Verdict.OPEN, "3")
    assert together([("a", good), ("c", unsure)]) == Outcome(Verdict.OPEN, "Not settled for c. All: a: 1; c: 3")
    both = together([("a", bad), ("c", unsure)])
    assert both == Outcome(Verdict.NOT_HERE, "Not for a. Not settled for c. All: a: 2; c: 3")


@pytest.mark.parametrize(
    ("held", "verdict", "since"),
    [
        ([True] * 6, Verdict.HOLDS, None),
        ([False, False, True, True, True, True], Verdict.FROM, 10**5),
        ([True, False, True, False, True, True], Verdict.FROM, 10**7),
        ([True, True, True, True, True, False], Verdict.NOT_HERE, None),
        ([False] * 6, Verdict.NOT_HERE, None),
    ],
)
def test_from_some_k_on_it_must_hold_at_every_k(held: list[bool], verdict: Verdict, since: int | None) -> None:
    outcome = from_some_k(KS, held, "")
    assert (outcome.verdict, outcome.since) == (verdict, since)


def test_an_outcome_says_since_when() -> None:
    assert str(Outcome(Verdict.FROM, "", 1e5)) == "holds from K = 1e5"
    assert str(Outcome(Verdict.NOT_HERE, "")) == "does not hold at this K"
    assert [Outcome(verdict, "").short for verdict in Verdict][:3] == ["holds", "not at this K", "not settled"]


def test_only_what_fails_is_explained() -> None:
    assert Claim("here", "x", "x", Outcome(Verdict.HOLDS, ""), "because").explanation == ""
    assert Claim("here", "x", "x", Outcome(Verdict.OPEN, ""), "because").explanation == ""
    assert Claim("here", "x", "x", Outcome(Verdict.NOT_HERE, ""), "because").explanation == "because"
    assert Claim("here", "x", "x", Outcome(Verdict.FROM, "", 10.0), "because").as_dict()["why"] == "because"


def test_numbers_are_written_for_people() -> None:
    assert spread(np.array([5.0])) == "5"
    assert number(-1234.5) == "-1,234"
    assert spread(np.array([10.0, 20.0, 30.0])).startswith("20 [1")


def test_learning_is_to_lose_less_than_half() -> None:
    never = np.array(KS, dtype=np.float64)
    bends = [np.full(3, min(k, 3e5)) for k in KS]
    assert (learns(KS, bends, never).verdict, learns(KS, bends, never).since) == (Verdict.FROM, 10**6)
    assert learns(KS, [np.full(3, 0.9 * k) for k in KS], never).verdict is Verdict.NOT_HERE
    assert learns(KS, [np.full(3, 0.1 * k) for k in KS], never).verdict is Verdict.HOLDS


def test_an_additive_cost_stops_growing() -> None:
    free = constant(*[100.0] * 6)
    plateau = constant(*[100.0 + min(k, 1e5) for k in KS])
    assert (flat(KS, free, plateau).verdict, flat(KS, free, plateau).since) == (Verdict.FROM, 10**6)
    multiplicative = constant(*[100.0 + k**0.5 for k in KS])
    assert flat(KS, free, multiplicative).verdict is Verdict.NOT_HERE
    jumps = constant(*[200.0] * 5, 3000.0)
    assert flat(KS, free, jumps).verdict is Verdict.NOT_HERE
    halves = [round(10 ** (half / 2)) for half in range(6, 12)]
    assert flat(halves, free, constant(*[200.0] * 4, 3000.0, 3000.0)).verdict is Verdict.NOT_HERE, "within a decade"
    assert flat(KS, plateau, free).verdict is Verdict.NOT_HERE, "what costs nothing shows no cost"
    assert flat(KS, multiplicative, free).verdict is Verdict.NOT_HERE, "nor does what gains ever more"


def test_privacy_is_affordable_where_it_at_most_doubles_the_regret() -> None:
    free = constant(*[float(k) ** 0.5 for k in KS])
    assert affordable(KS, free, constant(*[k**0.5 + 1000 for k in KS])).since == 10**6
    assert affordable(KS, free, constant(*[3 * k**0.5 for k in KS])).verdict is Verdict.NOT_HERE


def test_the_numbers_of_a_turning_point_are_those_around_it() -> None:
    said = learns(KS, [np.full(3, min(k, 3e5)) for k in KS], np.array(KS, dtype=np.float64)).numbers
    assert said == "K = 1,000: 1; K = 1e5: 1; K = 1e6: 0.3; K = 1e8: 0.003 of never learning's regret"


def test_switches() -> None:
    assert at_most(67, 100, "67").verdict is Verdict.HOLDS
    assert at_most(101, 100, "101").verdict is Verdict.NOT_HERE
    assert every_episode({"a": around(999.9, 0.01)}, 1000).verdict is Verdict.HOLDS
    assert every_episode({"a": around(999.9, 0.01), "b": around(700)}, 1000).verdict is Verdict.NOT_HERE


def test_noise() -> None:
    assert private([0.1, 1.0], [0.01, 0.9]).verdict is Verdict.HOLDS
    assert private([0.1, 1.0], [0.01, 1.1]).verdict is Verdict.NOT_HERE
    assert comparable([0.1, 10.0], [(1.05, 1.0), (2.0, 1.0)]).verdict is Verdict.HOLDS, "beyond 1 it is only told"
    assert comparable([0.1, 10.0], [(1.2, 1.0), (1.0, 1.0)]).verdict is Verdict.NOT_HERE


@pytest.mark.parametrize(("power", "verdict"), [(1.0, Verdict.HOLDS), (0.5, Verdict.HOLDS), (1.2, Verdict.NOT_HERE)])
def test_noise_grows_at_most_in_proportion(power: float, verdict: Verdict) -> None:
    def columns(values: list[float]) -> list[tuple[GaussianNoise, GaussianNoise]]:
        return [(GaussianNoise(value**power), GaussianNoise(value**power)) for value in values]

    outcome = growth([0.1, 1.0, 10.0], columns([10.0, 1.0, 0.9]), [2, 8], columns([2.0, 8.0]))
    assert outcome.verdict is verdict
    assert f"H^{power:.2f}" in outcome.numbers


def test_messages_shrink() -> None:
    assert shrinks([10, 100], [50.0, 12.0]).verdict is Verdict.HOLDS
    assert shrinks([10, 100, 1000], [50.0, 12.0, 13.0]).verdict is Verdict.NOT_HERE


def test_times_over_is_a_geometric_mean_whose_whole_interval_must_say_so() -> None:
    sure = times_over([around(40, 1, 1), around(10, 1, 2)], [around(10, 1, 3), around(2.5, 0.1, 4)])
    assert sure.verdict is Verdict.HOLDS
    assert sure.numbers.startswith("4 [")
    assert "over 2 environments and budgets" in sure.numbers
    mixed = times_over([around(90, 1, 1), around(10, 0.1, 2)], [around(10, 1, 3), around(10, 0.1, 4)])
    assert mixed.numbers.startswith("3 ["), "9 times and once are thrice in the geometric mean"
    assert mixed.verdict is Verdict.OPEN, "the interval reaches below"
    assert times_over([around(25, 4, 1)], [around(8, 2, 2)]).verdict is Verdict.OPEN
    assert times_over([around(20, 1, 1)], [around(10, 1, 2)]).verdict is Verdict.NOT_HERE
    assert times_over([], []).verdict is Verdict.NOT_HERE


def contest(place: str, **means: float) -> Contest:
    names = {"optimistic": "optimistic", "sdp_pe": "SDP-PE", "jdp": "UCBVI-JDP"}
    lines = {
        names[key]: Line(names[key], 20, interval(around(mean, 1)), mean, mean, learns=True, switches=1, seconds=1)
        for key, mean in means.items()
    }
    return Contest(place, 1.0, 20_000, 1e4, lines)


def test_nowhere_worse_looks_at_every_rival_in_every_contest() -> None:
    rivals = ("SDP-PE", "UCBVI-JDP")
    easy = contest("easy", optimistic=100, sdp_pe=300, jdp=400)
    close = contest("close", optimistic=100, sdp_pe=300, jdp=92)
    hard = contest("hard", optimistic=100, sdp_pe=80, jdp=400)
    assert nowhere_worse(Report((easy, close)), rivals).verdict is Verdict.HOLDS
    bad = nowhere_worse(Report((easy, close, hard)), rivals)
    assert bad.verdict is Verdict.NOT_HERE
    assert "SDP-PE: at worst 1.25 times its regret (hard, ε = 1:" in bad.numbers
    assert "UCBVI-JDP: at worst 1.09 times its regret (close" in bad.numbers


def test_a_good_policy_is_all_but_a_twentieth_of_the_way_from_some_k_on() -> None:
    assert good([10, 100], constant(0.96, 0.99)).verdict is Verdict.HOLDS
    assert good([10, 100], constant(0.9, 0.99)).since == 100
    assert good([10], [around(0.96, 0.1)]).verdict is Verdict.NOT_HERE, "the interval reaches below"


def test_an_additive_cost_needs_the_whole_interval() -> None:
    """The mean cost stays the same, but one seed's grows a thousandfold."""
    few, many = np.array([100.0, 100.0, 100.0, 5000.0]), np.array([100.0, 100.0, 5000.0, 100.0])
    free = [np.zeros(4)] * 2
    assert flat([10, 100], free, [few, few]).since == 100
    assert flat([10, 100], free, [few, many]).verdict is Verdict.NOT_HERE


def test_affordable_needs_the_whole_interval_and_says_it() -> None:
    free = [np.full(4, 100.0)]
    unsure = affordable([10], free, [np.array([10.0, 10.0, 10.0, 700.0])])
    assert unsure.verdict is Verdict.NOT_HERE
    assert "against 100" in unsure.numbers
    assert "[" in unsure.numbers


def test_switches_are_told_as_they_were_counted() -> None:
    outcome = fewer(np.full(4, 10.0), np.full(4, 18_000.0))
    assert outcome.verdict is Verdict.HOLDS
    assert outcome.numbers == "10 against 18,000: 1,800 times less often"
    assert fewer(np.full(4, 10.0), np.full(4, 900.0)).verdict is Verdict.NOT_HERE


def test_failing_parts_are_listed_apart_from_the_commas_in_their_names() -> None:
    held, failed = Outcome(Verdict.HOLDS, "1"), Outcome(Verdict.NOT_HERE, "2")
    told = together([("a, b", failed), ("c, d", failed), ("e", held)])
    assert told.numbers == "Not for a, b; c, d. All: a, b: 2; c, d: 2; e: 1"
