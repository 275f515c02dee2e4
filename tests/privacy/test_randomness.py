"""The samplers on the operating system's randomness: their argument exactly, their output by chi-square.

Nothing here can be seeded; every chi-square test fails a right sampler with probability 1e-7.
"""

from __future__ import annotations

import inspect
import itertools
import math
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from shufflerl.arrays import BoolArray, IntArray
from shufflerl.errors import ContractError
from shufflerl.privacy import randomness

LEVEL = 1e-7


def assert_fits(values: Iterable[int], probability: Callable[[int], float], most: int) -> None:
    """Chi-square of whole numbers against a law on 0, 1, ...; what is above `most` or rare shares one cell."""
    counted = Counter(values)
    draws = counted.total()
    cells = [value for value in range(most + 1) if draws * probability(value) >= 50]
    observed = np.array([counted[value] for value in cells])
    expected = draws * np.array([probability(value) for value in cells])
    rest, rest_expected = draws - observed.sum(), draws - expected.sum()
    if rest_expected < 1e-6:
        assert rest == 0
    else:
        assert stats.poisson.sf(rest - 1, rest_expected) > LEVEL
    if len(cells) > 1:
        assert stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), len(cells)) > LEVEL


@pytest.mark.parametrize("bound", [1, 2, 3, 10, 24])
def test_uniform_numbers_are_uniform(bound: int) -> None:
    drawn = randomness.uniform(bound, 20_000)
    assert drawn.dtype == np.int64
    assert drawn.shape == (20_000,)
    assert_fits(drawn.tolist(), lambda value: 1 / bound if value < bound else 0.0, bound - 1)


@pytest.mark.parametrize(("bound", "size"), [(3, 4), (2**24 - 1, 4), (2**24 + 1, 8), (10**12, 8)])
def test_uniform_numbers_reject_what_would_favour_small_ones(
    bound: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the largest multiple of the bound a key is drawn again; below it every remainder has as many keys."""
    limit = 256**size // bound * bound
    assert limit < 256**size
    keys = iter([256**size - 1, limit - 1, limit, 0])

    def urandom(wanted: int) -> bytes:
        return b"".join(next(keys).to_bytes(size, "little") for _ in range(wanted // size))

    monkeypatch.setattr(os, "urandom", urandom)
    assert randomness.uniform(bound, 2).tolist() == [bound - 1, 0]


def test_nothing_is_drawn_for_nothing() -> None:
    assert randomness.uniform(5, 0).tolist() == []
    assert randomness.permutation(0).tolist() == []
    assert randomness.permutation(1).tolist() == [0]
    assert randomness.bernoulli(Fraction(1, 3), 0).tolist() == []
    assert randomness.poisson(Fraction(0)) == 0
    assert randomness.poissons(Fraction(3), 0).tolist() == []
    assert randomness.poissons(Fraction(0), 3).tolist() == [0, 0, 0]
    assert randomness.discrete_laplace(Fraction(3), 0).tolist() == []
    assert randomness.truncated_laplace(Fraction(3), 5, 0).tolist() == []
    assert randomness.fair_bits(0) == 0


def test_permutations_are_uniform() -> None:
    ranks = {order: i for i, order in enumerate(itertools.permutations(range(4)))}
    drawn = [ranks[tuple(randomness.permutation(4).tolist())] for _ in range(12_000)]
    assert_fits(drawn, lambda value: 1 / 24 if value < 24 else 0.0, 23)


@given(size=st.integers(0, 300))
@settings(max_examples=30, deadline=None)
def test_a_permutation_is_one(size: int) -> None:
    assert sorted(randomness.permutation(size).tolist()) == list(range(size))


def test_a_permutation_is_drawn_again_when_keys_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties would be broken by the sort, in favour of the order in which the messages came."""
    keys = iter([[7, 7, 1], [3, 2, 1], [5, 5], [2, 1]])

    def urandom(size: int) -> bytes:
        return np.array(next(keys), dtype=np.uint64).tobytes()

    monkeypatch.setattr(os, "urandom", urandom)
    assert randomness.permutation(3).tolist() == [2, 1, 0]
    assert randomness.permutation(2).tolist() == [1, 0]


@pytest.mark.parametrize("probability", [Fraction(1, 1000), Fraction(1, 3), Fraction(0.46), Fraction(999, 1000)])
def test_bernoulli_events_have_their_probability(probability: Fraction) -> None:
    happened = int(randomness.bernoulli(probability, 50_000).sum())
    assert stats.binomtest(happened, 50_000, float(probability)).pvalue > LEVEL


def test_certain_events() -> None:
    assert randomness.bernoulli(Fraction(1), 1000).all()
    assert not randomness.bernoulli(Fraction(0), 1000).any()


@given(probability=st.fractions(0, 1).filter(lambda probability: probability < 1))
@settings(deadline=None)
def test_bernoulli_probabilities_are_exact(probability: Fraction) -> None:
    """The first 16 bits decide, or on a tie a second draw does; together they have exactly the probability."""
    first = math.floor(probability * 2**16)
    on_tie = probability * 2**16 - first
    favourable = on_tie * probability.denominator
    assert favourable.denominator == 1

    def happens(draw: int, second: int | None = None) -> bool:
        def randbelow(choices: int) -> int:
            assert second is not None
            assert choices == probability.denominator
            return second

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "urandom", lambda size: draw.to_bytes(size, "little"))
            patch.setattr(secrets, "randbelow", randbelow)
            return bool(randomness.bernoulli(probability, 1)[0])

    assert all(happens(draw) for draw in {0, first - 1} if 0 <= draw < first)
    assert not any(happens(draw) for draw in {first + 1, 2**16 - 1} if first < draw < 2**16)
    for second in {0, int(favourable) - 1, int(favourable), probability.denominator - 1} - {-1}:
        assert happens(first, second) == (second < favourable)


@pytest.mark.parametrize("mean", [Fraction(1, 1000), Fraction(1, 4), Fraction(1, 2), Fraction(4, 5), Fraction(37, 10)])
def test_small_poisson_counts_follow_their_law(mean: Fraction) -> None:
    drawn = [randomness.poisson(mean) for _ in range(6000)]
    assert_fits(drawn, lambda value: float(stats.poisson.pmf(value, float(mean))), 40)


@pytest.mark.parametrize(("mean", "size"), [(0.25, 20_000), (13.5, 20_000), (307.1, 2000)])
def test_many_poisson_counts_follow_their_law_and_are_independent(
    mean: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(randomness, "_AT_ONCE", 50_000)  # in several slices
    drawn = randomness.poissons(Fraction(mean), size)
    assert drawn.shape == (size,)
    assert_fits(drawn.tolist(), lambda value: float(stats.poisson.pmf(value, mean)), 600)
    scores = (drawn - mean) / math.sqrt(mean)
    assert abs((scores[1:] * scores[:-1]).mean()) < 5.4 * math.sqrt(1 / size)


def laplace_pmf(scale: float, value: int) -> float:
    return math.tanh(0.5 / scale) * math.exp(-abs(value) / scale)


#: Of one group at epsilon 5 and 1 and a full release at 5, as calibrated; fractions; and coarse ones.
SCALES = [Fraction(0.4000043), Fraction(1.9999880), Fraction(4.8), Fraction(1, 3), Fraction(3), Fraction(50)]


@pytest.mark.parametrize("scale", SCALES, ids=float)
def test_laplace_noise_follows_its_law(scale: Fraction) -> None:
    """Distances by chi-square; signs by how many of those that are not zero are positive."""
    drawn = randomness.discrete_laplace(scale, 40_000)
    assert drawn.shape == (40_000,)

    def at_distance(value: int) -> float:
        return laplace_pmf(float(scale), value) * (1 if value == 0 else 2)

    assert_fits(np.abs(drawn).tolist(), at_distance, 2000)
    assert stats.binomtest(int((drawn > 0).sum()), int((drawn != 0).sum())).pvalue > LEVEL


@pytest.mark.parametrize(("scale", "shift"), [(Fraction(1.9999880), 23), (Fraction(3), 3), (Fraction(0.4000043), 5)])
def test_truncated_laplace_noise_follows_its_law(scale: Fraction, shift: int) -> None:
    drawn = randomness.truncated_laplace(scale, shift, 20_000)
    assert drawn.shape == (20_000,)
    assert np.abs(drawn).max() <= shift
    inside = math.fsum(laplace_pmf(float(scale), z) for z in range(-shift, shift + 1))
    assert_fits((drawn + shift).tolist(), lambda value: laplace_pmf(float(scale), value - shift) / inside, 2 * shift)


@pytest.mark.parametrize("scale", [Fraction(0), Fraction(-1), Fraction(2**53), Fraction(1, 2**63)])
def test_scales_that_would_overflow_are_refused(scale: Fraction) -> None:
    with pytest.raises(ContractError, match="scale"):
        randomness.discrete_laplace(scale, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mean", "draws"), [(514.3, 6000), (4999.9, 1000), (5000.5, 1000), (5001.0, 1000), (1e4, 600), (1e5, 60), (1e6, 12)]
)
def test_large_poisson_counts_follow_their_law(mean: float, draws: int) -> None:
    """In cells of equal probability; and by their mean and spread, which tell of few draws as well."""
    drawn = np.array([randomness.poisson(Fraction(mean)) for _ in range(draws)])
    law = stats.poisson(mean)
    ends = np.unique(law.ppf(np.arange(1, draws // 50) / (draws // 50))) if draws >= 100 else np.array([])
    expected = draws * np.diff(law.cdf(ends), prepend=0.0, append=1.0)
    observed = np.bincount(np.searchsorted(ends, drawn), minlength=len(expected))
    assert stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), max(len(expected) - 1, 1)) > LEVEL
    assert abs(drawn.mean() - mean) < 5.4 * math.sqrt(mean / draws)
    spread = ((drawn - mean) ** 2).sum() / mean
    assert min(stats.chi2.sf(spread, draws), stats.chi2.cdf(spread, draws)) > LEVEL / 2


class _TooShortError(Exception):
    """The script ends before the sampler does; what could come next."""

    def __init__(self, choices: Iterable[int]) -> None:
        self.choices = choices


class _Branch:
    """Stands in for `source`: follows a script of outcomes and multiplies their probabilities."""

    source: ClassVar[str]

    def __init__(self, script: tuple[int, ...]) -> None:
        self.script, self.used, self.probability = script, 0, Fraction(1)


class _Events(_Branch):
    """Each event happens or does not."""

    source = "bernoulli"

    def __call__(self, probability: Fraction, size: int) -> BoolArray:
        outcomes = []
        for _ in range(size):
            if probability == 1:
                outcomes.append(True)
                continue
            if self.used == len(self.script):
                raise _TooShortError((False, True))
            outcomes.append(bool(self.script[self.used]))
            self.probability *= probability if outcomes[-1] else 1 - probability
            self.used += 1
        return np.array(outcomes, dtype=np.bool_)


def outcomes(
    sampler: Callable[[], int], follow: type[_Branch], goes_on: Callable[[_Branch], bool]
) -> dict[int, Fraction]:
    """Exact probability of each outcome of a sampler, along all branches that are followed to their end."""
    reached: dict[int, Fraction] = {}
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        branch = follow(scripts.pop())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(randomness, follow.source, branch)
            try:
                found = sampler()
            except _TooShortError as short:
                if goes_on(branch):
                    scripts += [(*branch.script, choice) for choice in short.choices]
                continue
        reached[found] = reached.get(found, Fraction(0)) + branch.probability
    return reached


@pytest.mark.parametrize("mean", [Fraction(1, 2), Fraction(1, 7)])
def test_one_piece_of_a_poisson_count_has_exactly_its_law(mean: Fraction) -> None:
    """Heights alive at the first attempt are (1-m) m^g / g!; the whole tree sums up to Poisson's law from below."""
    reached = outcomes(lambda: randomness.poisson(mean), _Events, lambda branch: branch.used < 12)
    unexplored = 1 - sum(reached.values())
    assert 0 < unexplored < Fraction(1, 100)
    for count in range(4):
        exact = math.exp(-mean) * float(mean) ** count / math.factorial(count)
        assert float(reached[count]) <= exact + 1e-12
        assert exact <= float(reached[count] + unexplored) + 1e-12


def test_first_attempts_of_a_piece_have_the_probabilities_of_the_argument() -> None:
    """Up to height 3, with no restart, as exact fractions: proportional to m^g / g!."""
    mean = Fraction(2, 5)

    def alive(height: int) -> Fraction:
        script: list[bool] = []
        for step in range(1, height + 1):
            script += [True] if step == 1 else [True, True]  # rise; survive, which is certain at the first step
        branch = _Events((*script, False))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(randomness, "bernoulli", branch)
            assert randomness.poisson(mean) == height
        return branch.probability

    for height in range(6):
        assert alive(height) == (1 - mean) * mean**height / math.factorial(height)


@given(mean=st.fractions(0, 50).filter(lambda mean: mean > 0))
@settings(deadline=None, max_examples=50)
def test_pieces_add_up_to_the_mean(mean: Fraction) -> None:
    asked: list[tuple[Fraction, int]] = []

    def never(probability: Fraction, size: int) -> BoolArray:
        asked.append((probability, size))
        return np.zeros(size, dtype=np.bool_)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(randomness, "bernoulli", never)
        assert randomness.poisson(mean) == 0
    piece, pieces = asked[0]
    assert piece * pieces == mean
    assert piece <= Fraction(1, 2)


class _Numbers(_Branch):
    """Each number below the bound is as probable as the others."""

    source = "uniform"

    def __call__(self, bound: int, size: int) -> IntArray:
        outcomes = []
        for _ in range(size):
            if bound > 1 and self.used == len(self.script):
                raise _TooShortError(range(bound))
            outcomes.append(self.script[self.used] if bound > 1 else 0)
            self.probability /= bound
            self.used += bound > 1
        return np.array(outcomes, dtype=np.int64)


@pytest.mark.parametrize(("x", "of"), [(0, 5), (1, 3), (2, 3), (3, 3), (7, 10)])
def test_decaying_events_have_exactly_their_probability(x: int, of: int) -> None:
    """Every branch of the argument, as fractions: together they close in on exp(-x/of) from both sides."""
    reached = outcomes(
        lambda: int(randomness.decays(np.array([x]), of)[0]),
        _Numbers,
        lambda branch: branch.probability >= Fraction(1, 3000),
    )
    unexplored = 1 - sum(reached.values())
    assert unexplored < Fraction(1, 15)
    happens = float(reached.get(1, 0))
    assert happens <= math.exp(-x / of) + 1e-12
    assert math.exp(-x / of) <= happens + float(unexplored) + 1e-12


def test_streaks_are_geometric() -> None:
    assert_fits(randomness.streaks(20_000).tolist(), lambda g: (1 - math.exp(-1)) * math.exp(-g), 30)


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_fair_bits_are_binomial(count: int) -> None:
    drawn = [randomness.fair_bits(count) for _ in range(10_000)]
    assert_fits(drawn, lambda value: float(stats.binom.pmf(value, count, 0.5)), count)


def test_no_sampler_takes_a_seed_or_a_generator() -> None:
    public = [
        f for name, f in inspect.getmembers(randomness, inspect.isfunction) if f.__module__ == randomness.__name__
    ]
    assert {f.__name__ for f in public} >= {
        "uniform",
        "permutation",
        "bernoulli",
        "poisson",
        "poissons",
        "discrete_laplace",
    }
    for function in public:
        assert {parameter.annotation for parameter in inspect.signature(function).parameters.values()} <= {
            "int",
            "Fraction",
            "IntArray",
        }


def test_two_runs_differ() -> None:
    """Two rows of twenty 62-bit numbers agree with probability 2^-1240."""
    first, second = (randomness.uniform(2**62, 20).tolist() for _ in range(2))
    assert first != second
