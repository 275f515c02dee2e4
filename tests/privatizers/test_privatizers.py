from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shufflerl import envs, privatizers
from shufflerl.counts import Batch, CountQuery, Counts, Release
from shufflerl.episodes import CompiledUCBVI
from shufflerl.errors import AccountingError, ContractError, InvalidInputError, PrivacyWarning
from shufflerl.learners.base import Learner
from shufflerl.learners.ucbvi import UCBVI
from shufflerl.loop import learn
from shufflerl.mdp import MDP
from shufflerl.noise import GaussianNoise
from shufflerl.population import CountPopulation
from shufflerl.privacy.accounting import Budget, calibrate, calibrate_gaussian
from shufflerl.privacy.loss import privacy_loss
from shufflerl.privacy.mechanism import (
    CentralNoise,
    LocalGaussian,
    LocalUnary,
    Mechanism,
    ServersNoise,
    ShuffledBinomial,
    ShuffledPoisson,
    TreeGaussian,
)
from shufflerl.privatizers.base import AdditivePrivatizer, BudgetedPrivatizer, Privatizer, Workload
from shufflerl.privatizers.central import CentralToeplitz, CentralTree, Continual
from shufflerl.returns import ReturnQuery
from tests.contracts.privatizer import MDP_, PrivatizerContract, learner
from tests.support.examples import full_batch, random_mdp, random_mixture

BUDGET = Budget(1.0, 1e-6)
#: Its many counters are independent copies of the noise: fewer privatizers have to be made for as many draws.
WIDE = random_mdp(31, horizon=2, states=6, actions=3)


def _make(name: str, seed: int = 0, serves: Learner | None = None, **parameters: Any) -> Privatizer:
    return privatizers.make(
        name, serves or learner(), epsilon=BUDGET.epsilon, delta=BUDGET.delta, seed=seed, **parameters
    )


class TestNone(PrivatizerContract):
    def make(self, seed: int = 0, serves: Learner | None = None) -> Privatizer:
        return privatizers.make("none")


class TestShuffle(PrivatizerContract):
    def make(self, seed: int = 0, serves: Learner | None = None) -> Privatizer:
        return _make("shuffle", seed, serves)


class TestShuffleWithDropouts(PrivatizerContract):
    def make(self, seed: int = 0, serves: Learner | None = None) -> Privatizer:
        return _make("shuffle", seed, serves, gamma=0.8, participations=2)


class TestServers(PrivatizerContract):
    def make(self, seed: int = 0, serves: Learner | None = None) -> Privatizer:
        return _make("shuffle", seed, serves, noise="servers")


class TestServersOfManyTimes(PrivatizerContract):
    def make(self, seed: int = 0, serves: Learner | None = None) -> Privatizer:
        return _make("shuffle", seed, serves, noise="servers", participations=5)


class TestShufflePaper(PrivatizerContract):
    def make(self, seed: int = 0, serves: Learner | None = None) -> Privatizer:
        return _make("shuffle-paper", seed, serves)


class TestCentral(PrivatizerContract):
    def make(self, seed: int = 0, serves: Learner | None = None) -> Privatizer:
        return _make("central", seed, serves)


class TestLocal(PrivatizerContract):
    def make(self, seed: int = 0, serves: Learner | None = None) -> Privatizer:
        return _make("local", seed, serves)


class TestLocalSampled(PrivatizerContract):
    depends_on_counts = True

    def make(self, seed: int = 0, serves: Learner | None = None) -> Privatizer:
        return _make("local-sampled", seed, serves)


class _ContinualContract(PrivatizerContract):
    """Increments of continual counting are correlated in time on purpose, and their law changes with it."""

    kind: type[Continual]

    def make(self, seed: int = 0, serves: Learner | None = None) -> Privatizer:
        return self.kind(BUDGET, Workload.of(serves or learner(), seed))

    def _errors(self, count: int):  # type: ignore[no-untyped-def]
        """Standardised, by each batch's own declared law."""
        releases, truth = self._releases(count)
        errors = np.stack([(release.values - truth) / release.noise.sd for release in releases])
        standard = [type(r)(r.batch, r.values, GaussianNoise(1.0), r.added_variance) for r in releases]
        return standard, errors

    def test_a_fresh_one_serves_a_restored_learner_from_where_it_is(self) -> None:
        """It cannot: its noise goes on from noise that is gone."""
        with pytest.raises(ContractError, match="the 5 batches already released, and that noise is gone"):
            self.make(serves=learner(batches_observed=5))

    def test_noise_is_independent_between_counters_and_batches(self) -> None:
        """Between counters it is."""
        running = np.cumsum([r.values for r in self._releases(400)[0]], axis=0)
        steps = np.diff(running, axis=0)[::16]
        across = np.corrcoef(steps, rowvar=False)[np.triu_indices(steps.shape[1], 1)]
        assert np.abs(across).max() < 0.8


class TestToeplitz(_ContinualContract):
    kind = CentralToeplitz

    @pytest.mark.slow
    def test_it_is_unbiased(self) -> None:
        """Single batches of many runs: along one run the errors cancel, which is the point of the mechanism."""
        errors = []
        for seed in range(200):
            release = self.make(seed).release(self._counts())
            errors.append((release.values - self._counts().values) / release.noise.sd)
        assert abs(np.mean(errors)) < 4.5 / np.sqrt(np.size(errors))


class TestTree(_ContinualContract):
    kind = CentralTree

    @pytest.mark.slow
    def test_it_is_unbiased(self) -> None:
        TestToeplitz.test_it_is_unbiased(self)  # type: ignore[arg-type]


def _kind(privatizer: Privatizer) -> tuple[type, type]:
    return type(privatizer), type(getattr(privatizer, "mechanism", None))


def test_every_registered_privatizer_runs_through_the_contract() -> None:
    suites: list[type[PrivatizerContract]] = [
        TestNone, TestShuffle, TestShufflePaper, TestCentral, TestLocal, TestLocalSampled, TestToeplitz, TestTree
    ]  # fmt: skip
    made = {_kind(suite().make()) for suite in suites}
    for name, _ in privatizers.PRIVATIZERS:
        running = UCBVI(MDP_.problem(100), 0)
        for serves in (learner(), running):
            assert _kind(privatizers.make(name) if name == "none" else _make(name, serves=serves)) in made


@pytest.mark.parametrize("where", ["added_variance", "variance_range", "noise", "another"])
@pytest.mark.parametrize("suite", [TestShuffle, TestTree, TestLocalSampled])
def test_a_leak_beside_the_values_is_found(
    suite: type[PrivatizerContract], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one counter, in one batch, in the last digits."""
    kind = type(suite().make())
    right = kind.release

    def leaking(self: Privatizer, counts: Counts) -> Release:
        good, secret = right(self, counts), 1 + 1e-12 * float(counts.values[13] > 0) * (counts.batch.index == 2)
        if where == "added_variance":
            return replace(good, added_variance=good.added_variance * secret)
        if where == "variance_range":
            return replace(good, variance_range=(1.0, 2.0 * secret))
        if where == "noise":
            return replace(good, noise=GaussianNoise(good.noise.sd * secret))
        object.__setattr__(good, "hint", secret)
        return good

    monkeypatch.setattr(kind, "release", leaking)
    with pytest.raises(AssertionError):
        suite().test_nothing_but_the_values_depends_on_the_counts()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CentralToeplitz, CentralTree])
def test_continual_counting_is_a_factorisation_of_running_sums(kind: type[Continual]) -> None:
    """The noise of T running sums is L z with A = L R, ||R||_{1->2} accounted: rebuilt here from white noise.

    The covariance of the running sums must be s^2 L L^T for a factorisation of the matrix of ones, and one batch's
    column R e_t must have norm at most the one accounted for. Checked through the privacy of the whole release:
    e_t shifts all running sums from t on by one, and its Mahalanobis length is what an attacker gains.
    """
    batches = 12
    learner_ = UCBVI(WIDE.problem(batches), 0)
    query = CountQuery.everything(WIDE.problem(1))
    draws = [
        kind(BUDGET, Workload.of(learner_, seed)).noise_of_episodes(query, range(batches))[0] for seed in range(200)
    ]
    running = np.cumsum(draws, axis=1)  # run, batch, counter: counters are independent copies
    covariance = np.einsum("rtc,rsc->ts", running, running) / (running.shape[0] * running.shape[2])
    sd = calibrate_gaussian(BUDGET, query.changed_counters).sd
    worst = max(
        np.sqrt(shift @ np.linalg.solve(covariance, shift))
        for shift in (np.arange(batches) >= t for t in range(batches))
    )
    assert worst == pytest.approx(1 / sd, rel=0.05)  # no more than one Gaussian release gains, and not less
    declared = np.cumsum(kind(BUDGET, Workload.of(learner_, 0)).noise_of_episodes(query, range(batches))[1])
    np.testing.assert_allclose(np.diag(covariance), declared, rtol=0.08)


def test_continual_counting_of_twenty_thousand_batches_stays_within_its_factor() -> None:
    """Noise of a running sum in units of one release's: at most 4.3 (square root), 14.5 (tree)."""
    learner_ = UCBVI(MDP_.problem(20_000), 0)
    one = calibrate_gaussian(BUDGET, CountQuery.everything(MDP_.problem(1)).changed_counters).sd
    for kind, most in ((CentralToeplitz, 4.3), (CentralTree, 14.5)):
        privatizer = kind(BUDGET, Workload.of(learner_, 0))
        factors = np.sqrt(privatizer.factors(0, 20_000))
        assert factors.max() <= most
        _, added = privatizer.noise_of_episodes(CountQuery.everything(MDP_.problem(1)), range(3))
        np.testing.assert_allclose(np.sqrt(np.cumsum(added)) / one, factors[:3])


def test_continual_counting_refuses_what_it_was_not_set_up_for() -> None:
    learner_ = UCBVI(MDP_.problem(3), 0)
    privatizer = CentralToeplitz(BUDGET, Workload.of(learner_, 0))
    users = CountPopulation(MDP_, 0)
    privatizer.release(users.play(full_batch(MDP_, 1)))
    other = Batch(1, 1, random_mixture(MDP_, 1, 0), CountQuery(MDP_.problem(1), [0], []))
    with pytest.raises(ContractError, match="one query"):
        privatizer.release(users.play(other))
    for index in (1, 2):
        privatizer.release(users.play(full_batch(MDP_, 1, index=index)))
    with pytest.raises(ContractError, match="3 batches"):
        privatizer.release(users.play(full_batch(MDP_, 1, index=3)))
    big = UCBVI(random_mdp(0, states=40).problem(10**6), 0)
    with pytest.raises(InvalidInputError, match="central-tree"):
        CentralToeplitz(BUDGET, Workload.of(big, 0)).noise_of_episodes(big.query, range(1))


def test_central_picks_what_suits_the_learner() -> None:
    running = UCBVI(MDP_.problem(100), 0)
    assert isinstance(privatizers.make("central", running, epsilon=1, delta=1e-6, seed=0), CentralToeplitz)
    assert not isinstance(privatizers.make("central", learner(), epsilon=1, delta=1e-6, seed=0), Continual)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shuffle", "shuffle-paper", "central", "central-tree", "local"])
def test_compiled_episodes_equal_the_loop_with_noise_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[np.ndarray, float]:
        learner_ = UCBVI(MDP_.problem(1500), 0)
        privatizer = privatizers.make(name, learner_, epsilon=5.0, delta=1e-6, seed=1)
        history = learn(learner_, CountPopulation(MDP_, 2), privatizer)
        assert isinstance(privatizer, BudgetedPrivatizer)
        assert len(privatizer.ledger.releases) == 1500
        return history.regret, learner_.noise_variance

    compiled, variance = run()
    monkeypatch.setattr(CompiledUCBVI, "if_possible", lambda *_: None)
    plain, same_variance = run()
    np.testing.assert_array_equal(compiled, plain)
    assert variance == same_variance


@pytest.mark.parametrize("compiled", [True, False])
def test_a_restart_with_a_fresh_privatizer_keeps_the_total_of_the_noise(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(CompiledUCBVI, "if_possible", lambda *_: None)
    first = UCBVI(MDP_.problem(90), 0)
    privatizer = privatizers.make("shuffle", first, epsilon=1.0, delta=1e-6, seed=1)
    learn(first, CountPopulation(MDP_, 2), privatizer, batches=40)
    second = UCBVI(MDP_.problem(90), 0)
    early = privatizers.make("shuffle", second, epsilon=1.0, delta=1e-6, seed=3)
    second.restore(first.save())
    with pytest.raises(ContractError, match="restore the learner first"):
        learn(second, CountPopulation(MDP_, 2), early)
    fresh = privatizers.make("shuffle", second, epsilon=1.0, delta=1e-6, seed=3)
    learn(second, CountPopulation(MDP_, 2), fresh)
    assert isinstance(fresh, BudgetedPrivatizer)
    assert fresh.ledger.releases == [f"batch {number}" for number in range(40, 90)]
    assert second.noise_variance == pytest.approx(90 * fresh.mechanism.noise(second.query).variance)


def test_none_serves_any_learner() -> None:
    none = privatizers.make("none")
    for seed in (0, 1):
        assert len(learn(UCBVI(MDP_.problem(20), seed), CountPopulation(MDP_, seed), none)) == 20


@pytest.mark.parametrize("name", [name for name, _ in privatizers.PRIVATIZERS])
def test_ucbvi_runs_with_every_privatizer_and_loses_less_with_a_larger_budget(name: str) -> None:
    mdp = envs.make("riverswim")
    assert isinstance(mdp, MDP)
    regrets = []
    for epsilon in (1e-2, 8.0):
        learner_ = UCBVI(mdp.problem(20_000), 0, batch=200)
        budget = {} if name == "none" else {"epsilon": epsilon, "delta": 1e-6, "seed": 1}
        privatizer = privatizers.make(name, learner_, **budget)  # type: ignore[arg-type]
        regrets.append(learn(learner_, CountPopulation(mdp, 2), privatizer).total_regret)
    if name in ("shuffle", "central"):
        assert regrets[1] < 0.5 * regrets[0]


def test_shuffle_noise_serves_honest_users_alone() -> None:
    """With gamma = 1/2 the noise of half of the users is already enough."""
    query = CountQuery.everything(MDP_.problem(1))
    full, half = (privatizers.make("shuffle", learner(), epsilon=1, delta=1e-6, seed=0, gamma=g) for g in (1.0, 0.5))
    noises = [p.release(CountPopulation(MDP_, 0).play(full_batch(MDP_, 10))).noise for p in (full, half)]
    assert noises[1].variance == pytest.approx(2 * noises[0].variance)
    certificates = [p.certificate(query) for p in (full, half)]
    assert certificates[0] is not None
    assert certificates[1] is not None
    assert certificates[1].epsilon == certificates[0].epsilon
    assert certificates[1].honest_fraction == 0.5


def test_the_papers_constants_are_charged_what_they_truly_cost() -> None:
    query = CountQuery.everything(MDP_.problem(1))
    certificate = _make("shuffle-paper").certificate(query)
    assert certificate is not None
    assert certificate.epsilon < 0.1 * BUDGET.epsilon


def test_participations_compose() -> None:
    query = CountQuery.everything(MDP_.problem(1))
    once, thrice = (_make("shuffle", participations=m).certificate(query) for m in (1, 3))
    assert once is not None
    assert thrice is not None
    assert thrice.noise_sd > 1.6 * once.noise_sd
    from shufflerl.noise import PoissonNoise

    composed = privacy_loss(PoissonNoise(thrice.noise_sd**2), query.changed_counters, 3)
    assert composed.epsilon(BUDGET.delta) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("name", ["shuffle", "central", "local"])
def test_batches_of_one_user_that_ask_for_different_parts_keep_to_the_budget(name: str) -> None:
    """Each calibrated to its own part, two could cost more together than either with another of its kind."""
    mixture = random_mixture(MDP_, 1, 0)
    serves = learner()
    everything = serves.widest_query
    part = everything.touching(1)
    twice = _make(name, serves=serves, participations=2)
    assert isinstance(twice, BudgetedPrivatizer)
    releases = []
    for index, query in enumerate((part, everything)):
        releases.append(twice.release(CountPopulation(MDP_, seed=1).play(Batch(index, 10, mixture, query))))
    one, other = releases
    assert one.noise == other.noise
    assert one.variance_range is None or len(set(one.variance_range)) == 1
    certificate = twice.certificate(part)
    assert certificate == twice.certificate(everything)
    assert certificate.changed_counters == 2 * everything.changed_counters
    charge = twice.mechanism.charge(everything, 10)
    together = privacy_loss(charge.noise, part.changed_counters + everything.changed_counters)
    assert together.delta(BUDGET.epsilon) <= BUDGET.delta


@pytest.mark.slow
@pytest.mark.parametrize("name", ["central", "central-tree"])
@pytest.mark.parametrize("participations", [1, 3])
def test_running_sums_of_a_part_have_the_noise_that_is_stated(name: str, participations: int) -> None:
    """Of users who come back as well: all batches ask the same. Over 4,000 draws, 5% is beyond 4 standard errors."""
    serves = UCBVI(WIDE.problem(20), 0, batch=10)
    part = CountQuery(serves.problem, [], [0])
    counts = CountPopulation(WIDE, seed=1).play(Batch(0, 10, random_mixture(WIDE, 1, 0), part))
    draws = []
    for seed in range(-(-4000 // part.size)):
        privatizer = privatizers.make(name, serves, epsilon=1.0, delta=1e-6, seed=seed, participations=participations)
        release = privatizer.release(counts)
        draws.append(release.values - counts.values)
    assert release.noise.variance == pytest.approx(release.added_variance)
    assert np.std(draws) == pytest.approx(release.noise.sd, rel=0.05)
    if name == "central-tree":
        certificate = privatizer.certificate(part)
        assert certificate is not None
        assert release.noise.sd == pytest.approx(certificate.noise_sd * 2**0.5)  # two levels hold two batches


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("shuffle", {"gamma": 0.0}, "gamma is 0.0"),
        ("shuffle", {"gamma": 1.5}, "gamma is 1.5"),
        ("shuffle", {"participations": 0}, "participations is 0"),
        ("shufle", {}, "Did you mean 'shuffle'"),
        ("central", {"gamma": 0.5}, "no parameter 'gamma'"),
        ("shuffle", {"epsilon": 0}, "epsilon is 0"),
        ("shuffle", {"epsilon": float("inf")}, "epsilon is inf"),
        ("shuffle", {"delta": 1.0}, "delta is 1.0"),
        ("shuffle", {"delta": -1e-5}, "delta is -1e-05"),
        ("shuffle", {"seed": None}, "needs the learner it serves and a seed"),
        ("shuffle", {"epsilon": None}, "needs a budget"),
    ],
)
def test_bad_parameters_are_refused(name: str, parameters: dict[str, object], message: str) -> None:
    fields = {"epsilon": 1.0, "delta": 1e-6, "seed": 0} | parameters
    with pytest.raises(InvalidInputError, match=message):
        privatizers.make(name, learner(), **fields)  # type: ignore[arg-type]


def test_none_takes_no_budget() -> None:
    with pytest.raises(InvalidInputError, match="takes no epsilon"):
        privatizers.make("none", epsilon=1.0)


def test_weak_budgets_are_allowed_with_a_warning() -> None:
    with pytest.warns(PrivacyWarning, match="epsilon is 12"):
        privatizers.make("central", learner(), epsilon=12.0, delta=1e-9, seed=0)
    with pytest.warns(PrivacyWarning, match="publishing the data"):
        privatizers.make("central", learner(), epsilon=1.0, delta=1e-3, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CentralToeplitz, CentralTree])
def test_taking_part_twice_in_continual_counting_needs_twice_the_noise(kind: type[Continual]) -> None:
    """The same user in two batches shifts two columns that overlap: checked on the covariance of the running sums."""
    batches = 8
    learner_ = UCBVI(WIDE.problem(batches), 0)
    query = CountQuery.everything(WIDE.problem(1))
    budget = Budget(1.0, 1e-6)
    draws = [
        kind(budget, Workload.of(learner_, seed), participations=2).noise_of_episodes(query, range(batches))[0]
        for seed in range(200)
    ]
    running = np.cumsum(draws, axis=1)
    covariance = np.einsum("rtc,rsc->ts", running, running) / (running.shape[0] * running.shape[2])
    shifts = [
        (np.arange(batches) >= s).astype(float) + (np.arange(batches) >= t) for s in range(batches) for t in range(s)
    ]
    worst = max(np.sqrt(shift @ np.linalg.solve(covariance, shift)) for shift in shifts)
    allowed = 1 / calibrate_gaussian(budget, query.changed_counters).sd
    assert worst <= 1.05 * allowed


@pytest.mark.parametrize("name", ["shuffle", "shuffle-paper", "local"])
@pytest.mark.parametrize("seed", [1, np.random.SeedSequence(1)])
def test_a_privatizer_made_after_a_restart_draws_other_noise(name: str, seed: int | np.random.SeedSequence) -> None:
    """Otherwise two batches would carry the same noise, and their difference none."""
    learner_ = UCBVI(MDP_.problem(100), 0, batch=10)
    users = CountPopulation(MDP_, 0)

    def errors() -> np.ndarray:
        privatizer = privatizers.make(name, learner_, epsilon=1.0, delta=1e-6, seed=seed)
        batch = learner_.next_batch()
        assert batch is not None
        counts = users.play(batch)
        release = privatizer.release(counts)
        learner_.observe(release)
        return release.values - counts.values

    first, second = errors(), errors()
    assert not np.array_equal(first, second)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.9


def test_gaussian_noise_lies_on_a_lattice_that_divides_one() -> None:
    """Unrounded, a value with bits below 2^-53 can only come from a count of zero."""
    rng = np.random.default_rng(0)
    for sd in (0.3, 17.5, 1e4, 1e12):
        noise = GaussianNoise(sd).sample(rng, 100_000)
        fineness = 2.0 ** max(0, 24 - int(np.frexp(sd)[1]))
        np.testing.assert_array_equal(noise * fineness, np.rint(noise * fineness))
        np.testing.assert_array_equal((noise + 1.0) - 1.0, noise)
        assert noise.std() == pytest.approx(sd, rel=0.02)


def test_dropouts_are_paid_for_in_noise() -> None:
    """With gamma = 0.5 the release carries twice the calibrated variance, not just a certificate that says so."""
    needed = calibrate(BUDGET, CountQuery.everything(MDP_.problem(1)).changed_counters).mean
    noise = _make("shuffle", 0, None, gamma=0.5).release(CountPopulation(MDP_, 0).play(full_batch(MDP_, 10))).noise
    assert noise.variance == pytest.approx(2 * needed)


def test_one_user_of_local_sampled_reports_one_step() -> None:
    """What a one-user batch releases outside the reported family and step is exactly nothing."""
    learner_ = UCBVI(MDP_.problem(2000), 0)
    privatizer = privatizers.make("local-sampled", learner_, epsilon=1.0, delta=1e-6, seed=0)
    users, chosen = CountPopulation(MDP_, 0), []
    for index in range(600):
        batch = full_batch(MDP_, 1, index=index)
        reported = np.unique(batch.query.groups[privatizer.release(users.play(batch)).values != 0])
        assert len(reported) == 1  # a bit of zero is released as -q times the weight, so a report always shows
        chosen.append(reported[0])
    assert np.bincount(chosen, minlength=3).min() > 150  # 200 expected of each, deviation 11.5


@pytest.mark.parametrize("batches", [7, 8, 9, 16])
def test_the_tree_has_a_level_for_every_node_a_batch_is_in(batches: int) -> None:
    """At T = 2^j the last running sum is one node, of level j: j + 1 levels."""
    tree = CentralTree(BUDGET, Workload(CountQuery.everything(MDP_.problem(batches)), batches, 0))
    assert tree.levels == int(np.floor(np.log2(batches))) + 1
    query = CountQuery.everything(MDP_.problem(1))
    assert tree.noise_of_episodes(query, range(batches))[0].shape == (batches, query.size)


def test_a_privatizer_with_a_release_of_its_own_is_not_bypassed() -> None:
    class Watched(AdditivePrivatizer):
        seen = 0

        def release(self, counts: Counts) -> Release:
            self.seen += 1
            return super().release(counts)

    learner_ = UCBVI(MDP_.problem(50), 0)
    privatizer = Watched(ShuffledPoisson(BUDGET), Workload.of(learner_, 0))
    learn(learner_, CountPopulation(MDP_, 0), privatizer)
    assert privatizer.seen == 50


def test_without_privacy_no_noise_is_drawn_ahead() -> None:
    """No rows at all: the compiled loop would add what is in them, whatever that is."""
    query = CountQuery.everything(MDP_.problem(1))
    noise, added_variances = privatizers.make("none").noise_of_episodes(query, range(5))
    assert noise.shape == (0, query.size)
    assert added_variances.shape == (0,)


@pytest.mark.parametrize("budget", [Budget(40.0, 0.05), Budget(40.0, 1e-5), Budget(48.0, 1e-5)])
def test_the_papers_certificate_covers_every_size_of_batch(budget: Budget) -> None:
    """What is drawn costs no more than is charged, and that no more than is certified; of many users it is equal.

    At the largest budget tau is so small that few users are certified a finite epsilon, and many none at all.
    """
    mechanism = ShuffledBinomial(budget)
    query = CountQuery.everything(MDP_.problem(1))
    stated = mechanism.certificate(query).epsilon
    tau = mechanism.tau(query)
    for users in (1, 2, int(tau), int(tau) + 1, int(tau) + 2, int(2 * tau), int(100 * tau), 10**6):
        charge, drawn = mechanism.charge(query, users), mechanism.noise(query, users)
        charged = privacy_loss(charge.noise, charge.changed).epsilon(budget.delta)
        assert privacy_loss(drawn, query.changed_counters).epsilon(budget.delta) <= charged <= stated
        assert users <= tau or charge.noise == drawn


@pytest.mark.parametrize(
    "kind", [ShuffledPoisson, ShuffledBinomial, ServersNoise, CentralNoise, TreeGaussian, LocalGaussian, LocalUnary]
)
def test_a_certificate_covers_queries_for_fewer_policies(kind: type[Mechanism[Any]]) -> None:
    """A search compares fewer and fewer; the paper's tau falls with their number, and with it the noise."""
    mechanism = kind(BUDGET)
    stated = mechanism.certificate(ReturnQuery(16, (0.0, 1.0))).epsilon
    for policies in (16, 12, 2, 1):
        for users in (1, 10**6):
            charge = mechanism.charge(ReturnQuery(policies, (0.0, 1.0)), users)
            assert privacy_loss(charge.noise, charge.changed).epsilon(BUDGET.delta) <= stated


@pytest.mark.parametrize("participations", [1, 3])
def test_noise_may_fail_in_every_participation(participations: int) -> None:
    """Each takes (1 + e^epsilon) times its probability of delta; for what is drawn there is what they leave."""
    query, failure = ReturnQuery(16, (0.0, 1.0)), 5e-8
    mechanism = ShuffledPoisson(BUDGET, participations, failure=failure)
    left = BUDGET.delta - (1 + math.exp(BUDGET.epsilon)) * participations * failure
    assert privacy_loss(mechanism.noise(query), query.changed_counters, participations).delta(BUDGET.epsilon) <= left
    assert mechanism.charge(query).failure == pytest.approx(participations * failure)
    assert mechanism.charge(query).delta(BUDGET.epsilon) <= BUDGET.delta


def test_of_both_servers_noise_the_weaker_is_charged() -> None:
    """The cut of the dummies costs a part of delta that the coordinator's noise, uncut, does not."""
    query = ReturnQuery(16, (0.0, 1.0))
    mechanism = ServersNoise(BUDGET)
    charge, parts = mechanism.charge(query), mechanism.noise(query).parts
    costs = [privacy_loss(law, query.changed_counters).delta(BUDGET.epsilon) for law in parts]
    assert costs[1] < costs[0] == privacy_loss(charge.noise, charge.changed).delta(BUDGET.epsilon) <= BUDGET.delta


@pytest.mark.parametrize("kind", [ShuffledPoisson, ShuffledBinomial, CentralNoise, TreeGaussian, LocalGaussian])
def test_a_mechanism_refuses_what_is_no_number_of_times_or_no_fraction(kind: type[Mechanism[Any]]) -> None:
    for times in (0, -1, 1.5, None):
        with pytest.raises(InvalidInputError, match="participations"):
            kind(BUDGET, times)  # type: ignore[arg-type]
    for fraction in (0.0, 1.01, -0.5, math.nan):
        with pytest.raises(InvalidInputError, match="honest_fraction"):
            kind(BUDGET, 1, fraction)


@pytest.mark.parametrize("excludable", [0.5, 0.6, math.nan])
def test_a_mechanism_refuses_to_exclude_all_whom_it_relies_on(excludable: float) -> None:
    with pytest.raises(InvalidInputError, match="nobody's noise is left"):
        ShuffledPoisson(BUDGET, honest_fraction=0.5, excludable=excludable)


@pytest.mark.parametrize("less", [{"excludable": -0.1}, {"margin": -0.1}])
def test_a_mechanism_refuses_to_draw_less_than_it_charges(less: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError, match="expected 0 or more"):
        ShuffledPoisson(BUDGET, **less)  # type: ignore[arg-type]


def test_a_budget_that_cannot_be_met_is_refused_when_the_privatizer_is_made() -> None:
    with pytest.raises(AccountingError, match="rounding error"):
        privatizers.make("shuffle", learner(), epsilon=1.0, delta=1e-14, seed=0)
    with pytest.raises(InvalidInputError, match="one participation"):
        privatizers.make("local-sampled", learner(), epsilon=1.0, delta=1e-6, seed=0, participations=2)
