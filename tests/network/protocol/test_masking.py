"""What all agree on about masked vectors: that sums cannot wrap, how random they look, and what exclusion costs."""

from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy import stats

from shufflerl.errors import InvalidInputError
from shufflerl.network.node.reporting import randomize_episode
from shufflerl.network.protocol import costs, masking, wire
from shufflerl.network.protocol.agreement import UnacceptableError, by_users, parse_announcement
from shufflerl.network.protocol.sources import Servers, Users
from shufflerl.network.protocol.wire import ProblemError, Reason, Transport
from shufflerl.network.shuffler.shuffler import Limits
from shufflerl.noise import DiscreteLaplace, NoiseSum, PoissonNoise, TruncatedLaplace
from shufflerl.privacy.accounting import Budget, calibrate
from shufflerl.privacy.loss import privacy_loss
from tests.support.network_world import EPISODE, QUERY, World, agreement_of, protocol_of, terms

NEEDED = calibrate(Budget(1.0, 1e-5), QUERY.changed_counters).mean


@pytest.mark.parametrize(("users", "noise"), [(1, 1e-9), (1000, 300.0), (30_000, 900.0), (10**9, 1e8)])
def test_a_sum_cannot_wrap_nor_an_honest_one_be_refused(users: int, noise: float) -> None:
    low, high = Users(QUERY, users, PoissonNoise(noise)).count_range
    assert low == 0
    assert QUERY.size * stats.poisson.sf(high - users, noise) < np.exp(-35)
    assert 2 * high < 2 ** (8 * masking.word_bytes(low, high))
    assert masking.word_bytes(low, high) == (2 if users < 31_000 else 4)


@pytest.mark.parametrize("dummies", [PoissonNoise(300.0), TruncatedLaplace(2.0, 34)])
@pytest.mark.parametrize("own", [PoissonNoise(300.0), DiscreteLaplace(2.0)])
def test_nor_can_a_sum_with_the_noise_of_both_servers(
    dummies: PoissonNoise | TruncatedLaplace, own: PoissonNoise | DiscreteLaplace
) -> None:
    low, high = Servers(QUERY, 1000, dummies, own).count_range
    both = NoiseSum((dummies, own))
    furthest = both.bound(1e-15 / QUERY.size)
    assert low <= both.mean - furthest < both.mean + furthest <= high - 1000
    assert high - low < 2**15
    ends = np.array([low, 0, high], dtype=np.int64)
    assert masking.signed(ends.astype("<u2"), low).tolist() == ends.tolist()


@given(mean=st.floats(1e-9, 1e9), cases=st.integers(1, 10**12))
def test_what_no_count_exceeds_is_by_chernoff_and_no_more(mean: float, cases: int) -> None:
    """One more is as rare as it must be, the cap itself is not: shorter would cut off noise, longer only costs."""
    most = masking.max_poisson(mean, cases)

    def exponent(x: int) -> float:
        return x * np.log(x / mean) - x + mean if x > mean else 0.0

    assert exponent(most) < 35 + np.log(cases) <= exponent(most + 1)


def test_a_word_is_as_wide_as_the_sum_needs() -> None:
    """An honest sum fills at most half of the range, to the last one; beyond four bytes it is refused."""
    noise = masking.max_poisson(100.0, 24)
    for users, size in ((2**15 - 1 - noise, 2), (2**15 - noise, 4), (2**31 - 1 - noise, 4)):
        assert costs.word_bytes(Users(QUERY, users, PoissonNoise(100.0))) == size
    with pytest.raises(InvalidInputError, match="masked sums end at"):
        costs.word_bytes(Users(QUERY, 2**31 - noise, PoissonNoise(100.0)))


def test_a_mask_is_what_the_page_says() -> None:
    """The key stream block by block: nodes and coordinators of all versions must find the same."""
    seed, block = bytes(range(32)), Cipher(algorithms.AES(bytes(range(16))), modes.ECB()).encryptor()
    first = int.from_bytes(seed[16:])
    stream = b"".join(block.update((first + number).to_bytes(16)) for number in range(3))
    assert masking.mask(seed, 24, 2).tolist() == np.frombuffer(stream, dtype="<u2").tolist()
    assert masking.mask(seed, 12, 4).tolist() == np.frombuffer(stream, dtype="<u4").tolist()


def test_what_makes_no_sense_as_sums_is_refused() -> None:
    world = World(transport=Transport.sums)
    for changes in ({"users": 2**31}, {"excludable": 3}, {"transport": Transport.tags, "excludable": 1}):
        with pytest.raises(ProblemError) as refused:
            parse_announcement(wire.encode(world.announcement(**changes)))
        assert refused.value.reason == Reason.malformed
    with pytest.raises(InvalidInputError, match="expected 32"):
        masking.mask(b"short", 5, 2)
    long = World(transport=Transport.sums, limits=Limits(min_batch_size=1, max_messages=2))
    with pytest.raises(ProblemError, match="max_messages"):
        long.announce()
    with pytest.raises(UnacceptableError, match="max_messages"):
        terms(max_messages=2).check(agreement_of(world, noise_mean=2 * NEEDED))


# What exclusion costs.


def test_a_node_does_not_rely_on_noise_that_may_be_excluded() -> None:
    """Of n users' noise that of the honest, less all that may be excluded, must do: (gamma n - e) / n of it."""
    world = World(users=100, transport=Transport.sums, excludable=20)
    agreed = agreement_of(world, noise_mean=NEEDED * 1.01 / 0.7)
    assert terms(honest_fraction=0.9).charge(agreed).noise.variance == pytest.approx(NEEDED * 1.01, rel=1e-12)
    terms(honest_fraction=0.9).check(agreed)
    with pytest.raises(UnacceptableError, match="20 excluded"):
        terms(honest_fraction=0.89).check(agreed)
    for excludable in (90, 99):
        world.excludable = excludable
        with pytest.raises(UnacceptableError, match="none need be left"):
            terms(honest_fraction=0.9).check(agreement_of(world, noise_mean=1e6))


def test_a_node_that_refuses_names_noise_that_is_enough_whoever_is_excluded() -> None:
    """Rounded to the six digits that it says."""
    world = World(users=1000, transport=Transport.sums, excludable=300)
    with pytest.raises(UnacceptableError, match="must announce at least Poisson noise of mean") as refused:
        terms().check(agreement_of(world, noise_mean=NEEDED))
    enough = float(str(refused.value).removesuffix(".").rpartition(" ")[2])
    terms().check(agreement_of(world, noise_mean=enough * (1 + 1e-5)))
    with pytest.raises(UnacceptableError):
        terms().check(agreement_of(world, noise_mean=enough * (1 - 1e-4)))


def test_who_may_be_excluded_does_not_count() -> None:
    """With noise enough for one user alone a coordinator could else be given the sum of one user, or of a few."""
    world = World(users=120, transport=Transport.sums, excludable=20, limits=Limits(min_batch_size=100))
    terms(min_batch_size=100).check(agreement_of(world, noise_mean=2 * NEEDED))
    assert world.announce(noise_mean=2 * NEEDED).users == 120
    for excludable in (21, 119):
        world = World(users=120, transport=Transport.sums, excludable=excludable, limits=Limits(min_batch_size=100))
        with pytest.raises(UnacceptableError, match=f"120 users less {excludable} that may be excluded"):
            terms(min_batch_size=100).check(agreement_of(world, noise_mean=200 * NEEDED))
        with pytest.raises(ProblemError, match=f"120 users, of whom {excludable} may be excluded") as refused:
            world.announce(noise_mean=200 * NEEDED)
        assert refused.value.reason == Reason.below_minimum


@pytest.mark.parametrize("transport", Transport)
def test_noise_that_no_device_could_draw_is_refused(transport: Transport) -> None:
    """A vector is equally long whatever is counted in it, so its length does not bound the noise to be drawn."""
    world = World(users=100, transport=transport)
    said = world.announcement(noise_mean=100 * 20e6 / 24)
    parse_announcement(wire.encode(said))
    with pytest.raises(ProblemError, match="would draw about 20,240,000 noise tags"):
        parse_announcement(wire.encode(replace(said, noise=wire.NoiseByUsers(mean=100 * 20.24e6 / 24))))


@pytest.mark.slow
@given(users=st.integers(2, 10**6), data=st.data(), fraction=st.floats(0.05, 1.0))
@settings(max_examples=60, deadline=None)
def test_what_the_coordinator_announces_is_accepted_to_the_last_digit(
    users: int, data: st.DataObject, fraction: float
) -> None:
    excludable = data.draw(st.integers(0, max(0, int(0.9 * fraction * users) - 1)))
    noise = by_users(Budget(1.0, 1e-5), fraction, excludable / users).noise(QUERY)
    world = World(users=users, transport=Transport.sums, excludable=excludable)
    agreed = agreement_of(world, noise_mean=noise.mean)
    terms(honest_fraction=fraction).check(agreed)
    # Without the excluded and the dishonest, what is left certifies the budget; a hundredth less would not.
    left = terms(honest_fraction=fraction).charge(agreed).noise
    assert privacy_loss(left, QUERY.changed_counters).delta(1.0) <= 1e-5
    assert left.variance == pytest.approx(NEEDED, rel=1e-9)
    assert protocol_of(agreed).min_reports == users - excludable


def test_nobody_can_be_excluded_to_the_last() -> None:
    with pytest.raises(InvalidInputError, match="Let fewer be excluded"):
        by_users(Budget(1.0, 1e-5), 0.5, 0.5).noise(QUERY)


def test_tags_that_are_sealed_one_by_one_come_in_an_order_that_tells_nothing() -> None:
    """Drawn, the true ones come first; only where all are counted may they be left so."""
    for transport in Transport:
        agreed = agreement_of(World(transport=transport), noise_mean=300.0)
        tags = [randomize_episode(agreed, EPISODE).tolist() for _ in range(5)]
        assert all(one == sorted(one) for one in tags) == (transport == Transport.tags)
