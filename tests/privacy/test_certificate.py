from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shufflerl import privatizers
from shufflerl.counts import CountQuery
from shufflerl.errors import AccountingError, InvalidInputError
from shufflerl.learners.ucbvi import UCBVI
from shufflerl.mdp import Problem
from shufflerl.noise import Noise, PoissonNoise
from shufflerl.population import CountPopulation
from shufflerl.privacy.accounting import Budget
from shufflerl.privacy.certificate import ASSUMPTIONS, IMPLICATIONS, Certificate, at_most
from shufflerl.privacy.loss import privacy_loss
from shufflerl.privacy.mechanism import (
    CentralNoise,
    LocalGaussian,
    LocalUnary,
    Mechanism,
    ServersNoise,
    ShuffledBinomial,
    ShuffledPoisson,
)
from shufflerl.privacy.sizing import certificate_of, size_up
from tests.support.examples import random_mdp

PROBLEM = random_mdp(0, horizon=6, states=4).problem(1000)
PRIVATE = [name for name, _ in privatizers.PRIVATIZERS if name != "none"]


def _certificate(name: str, **parameters: Any) -> Certificate:
    learner = UCBVI(PROBLEM, 0)
    privatizer = privatizers.make(name, learner, epsilon=1.0, delta=1e-5, seed=0, **parameters)
    certificate = privatizer.certificate(CountQuery.everything(PROBLEM))
    assert certificate is not None
    return certificate


@pytest.mark.parametrize("name", PRIVATE)
def test_text_and_json_say_the_same(name: str) -> None:
    certificate = _certificate(name)
    figures = json.loads(json.dumps(certificate.as_dict()))
    text = " ".join(str(certificate).split())
    assert f"({at_most(figures['epsilon'])}, 1e-05)-differential privacy in the {figures['model']} model" in text
    assert figures["mechanism"] in text
    assert figures["against"] in text
    assert figures["neighbours"] in text
    assert figures["implies"] in text
    for assumption, meaning in figures["assumptions"].items():
        assert f"{assumption}: {meaning}" in text
    assert figures["epsilon"] <= figures["budget_epsilon"] + 1e-9


@pytest.mark.parametrize("horizon", [1, 3])
@pytest.mark.parametrize("name", [name for name in PRIVATE if not name.startswith("central")])
def test_the_noise_that_is_told_is_on_the_report_of_one_user(name: str, horizon: int) -> None:
    mdp = random_mdp(0, horizon=horizon)
    learner = UCBVI(mdp.problem(1000), 0)
    privatizer = privatizers.make(name, learner, epsilon=1.0, delta=1e-5, seed=0)
    batch = learner.next_batch()
    assert batch is not None
    assert batch.users == 1
    certificate = privatizer.certificate(batch.query)
    assert certificate is not None
    assert certificate.noise_sd == privatizer.release(CountPopulation(mdp, 0).play(batch)).noise.sd


@pytest.mark.parametrize(
    "kind", [ShuffledPoisson, ServersNoise, ShuffledBinomial, CentralNoise, LocalGaussian, LocalUnary]
)
def test_a_certificate_covers_every_part_of_what_it_is_for(kind: type[Mechanism[Noise]]) -> None:
    """Also a part that is calibrated closer to the budget than the whole."""
    mechanism, everything = kind(Budget(1.0, 1e-5)), CountQuery.everything(random_mdp(0, horizon=3).problem(1000))
    certified = mechanism.certificate(everything).epsilon
    for steps in (1, 2, 3):
        charge = mechanism.charge(CountQuery(everything, [], range(steps)))
        assert privacy_loss(charge.noise, charge.changed).epsilon(1e-5) <= certified


@given(bound=st.floats(1e-300, 1e300), digits=st.integers(1, 12))
@example(bound=1.0000000000000002, digits=4)
@example(bound=0.1, digits=4)
def test_a_printed_bound_is_a_bound(bound: float, digits: int) -> None:
    """Never below, and above by less than one of its last digit; what has so few digits is printed as it is."""
    printed = at_most(bound, digits)
    assert bound <= float(printed) < bound * (1 + 10.0 ** (1 - digits)) * (1 + 1e-15)
    assert at_most(float(printed), digits) == printed
    assert at_most(np.float64(bound), digits) == printed
    assert at_most(float("inf")) == "inf"


@pytest.mark.parametrize("epsilon", [0.10001, 0.99994, 1.00001, 0.37, 12.3449])
def test_no_certificate_prints_less_than_it_costs(epsilon: float) -> None:
    certificate = replace(_certificate("shuffle"), epsilon=epsilon, delta=1.0000049e-5)
    claim = str(certificate).partition(")")[0].lstrip("(").split(", ")
    assert float(claim[0]) >= certificate.epsilon
    assert float(claim[1]) >= certificate.delta


def test_a_budget_is_told_where_there_is_one() -> None:
    assert "  budget       epsilon 1\n" in str(_certificate("shuffle"))
    alone = certificate_of(400.0, 1e-5, horizon=6, gamma=1.0, participations=2)
    assert "  budget  " not in str(alone)
    assert alone.changed_counters == 2 * 22
    assert "  takes part   2 times\n" in str(alone)
    assert "  takes part   1 time\n" in str(_certificate("shuffle"))


def test_a_notebook_shows_what_the_text_says() -> None:
    certificate = _certificate("shuffle")
    shown, text = unescape(certificate._repr_html_()), " ".join(str(certificate).split())
    figures = certificate.as_dict()
    for said in ("epsilon 1<", figures["mechanism"], *figures["assumptions"].values(), figures["implies"]):
        assert said in shown
        assert said.rstrip("<") in text
    assert "none" in certificate_of(400.0, 1e-5, horizon=6, gamma=1.0)._repr_html_()


def test_models_of_trust_name_whom_they_trust() -> None:
    assert "honest shuffler" in _certificate("shuffle").assumptions
    assert "trusted server" in _certificate("central").assumptions
    local = _certificate("local")
    assert not {"honest shuffler", "trusted server"} & set(local.assumptions)
    assert set(IMPLICATIONS) == {"shuffle", "central", "local"}
    servers = _certificate("shuffle", noise="servers")
    assert not {"honest shuffler", "honest users", "honest enrolment"} & set(servers.assumptions)
    used = {name for kind in ("shuffle", "central", "local-sampled") for name in _certificate(kind).assumptions}
    used |= set(servers.assumptions)
    assert used | {"adding shuffler"} == set(ASSUMPTIONS)  # which is said of masked sums, by the network


def test_the_privacy_officer_is_told_to_check_every_assumption() -> None:
    """Those of users' noise in their order, with that of masked sums beside the one it replaces, and of servers'."""
    page = (Path(__file__).parents[2] / "docs" / "privacy-officer.md").read_text()
    table = page.split("## Check 5: assumptions")[1].split("\n## ")[0]
    rows = [row.split(", ") for row in re.findall(r"^\| ([a-z ,]+) \| ", table, flags=re.MULTILINE)[1:]]
    by_users, by_servers = (
        _certificate("shuffle", noise=source).as_dict()["assumptions"] for source in ("users", "servers")
    )
    first = [names[0] for names in rows]
    assert [name for name in first if name in by_users] == list(by_users)
    assert set(first) == {*by_users, *by_servers}
    assert [name for names in rows for name in names[1:]] == ["adding shuffler"]


def test_a_given_noise_is_certified_for_what_it_is() -> None:
    sized = size_up(1.0, 1e-5, horizon=6, states=4, actions=2, users=1000, gamma=1.0)
    certificate = certificate_of(sized["lambda"], 1e-5, horizon=6, gamma=1.0, participations=1)
    assert certificate.epsilon == pytest.approx(1.0, abs=1e-3)
    assert certificate.changed_counters == 22
    weaker = certificate_of(sized["lambda"], 1e-5, horizon=6, gamma=0.5, participations=1)
    twice = certificate_of(sized["lambda"], 1e-5, horizon=6, gamma=1.0, participations=2)
    assert weaker.epsilon == pytest.approx(twice.epsilon, rel=0.02)  # half the noise or twice the exposure
    assert weaker.epsilon > 1.35


@pytest.mark.parametrize(("horizon", "law"), [(1, "discrete laplace"), (6, "poisson")])
def test_what_is_sized_for_servers_is_certified_for_each_of_them(horizon: int, law: str) -> None:
    """Nothing is asked of users but one tag per family and step, and both servers' noise adds up."""
    shape = {"horizon": horizon, "states": 4, "actions": 2, "users": 1000}
    sized, by_users = (size_up(1.0, 1e-5, **shape, noise=source) for source in ("servers", "users"))
    assert sized["law"] == law
    assert by_users["law"] == "poisson"
    assert sized.keys() == by_users.keys()
    assert sized["messages_per_user"] == 2 * horizon - 1
    assert sized["true_epsilon"] <= 1.0
    noise = ServersNoise(Budget(1.0, 1e-5)).dummies(CountQuery.everything(Problem(horizon, 4, 2, 1000)))
    assert sized["noise_sd"] == pytest.approx(math.sqrt(2) * noise.sd, rel=1e-3)
    if isinstance(noise, PoissonNoise):
        certificate = certificate_of(noise.mean, 1e-5, horizon=horizon, noise="servers")
    else:
        certificate = certificate_of(None, 1e-5, horizon=horizon, noise="servers", scale=noise.scale, shift=noise.shift)
        assert certificate_of(None, 1e-5, horizon=horizon, noise="servers", scale=1.0, shift=3).epsilon == math.inf
    assert certificate.epsilon == pytest.approx(sized["true_epsilon"])
    assert certificate.noise_sd == pytest.approx(sized["noise_sd"])
    assert "separate servers" in certificate.assumptions


def test_noise_that_is_not_clear_is_refused() -> None:
    for law, source in (({}, "servers"), ({"scale": 2.0}, "servers"), ({"scale": 2.0, "shift": 30}, "users")):
        with pytest.raises(InvalidInputError, match="Which noise is not clear"):
            certificate_of(None, 1e-5, horizon=6, noise=source, **law)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="nothing rests on users"):
        size_up(1.0, 1e-5, horizon=6, states=4, actions=2, users=1, gamma=0.5, noise="servers")


def test_one_user_alone_is_a_batch() -> None:
    sized = size_up(1.0, 1e-5, horizon=6, states=4, actions=2, users=1, gamma=1.0)
    assert sized["messages_per_user"] == pytest.approx(11 + 256 * sized["lambda"])


def test_sizes_for_a_paper_sized_problem() -> None:
    sized = size_up(1.0, 1e-5, horizon=6, states=4, actions=2, users=1000, gamma=1.0)
    assert sized["noise_sd"] == pytest.approx(17.5, abs=0.05)
    assert sized["paper"]["noise_sd"] == pytest.approx(354, abs=0.5)
    assert sized["messages_per_user"] == pytest.approx(11 + 256 * sized["lambda"] / 1000)
    wider = size_up(1.0, 1e-5, horizon=6, states=4, actions=2, users=1000, gamma=0.5)
    assert wider["lambda"] == pytest.approx(2 * sized["lambda"])


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_sizes_state_the_budget_and_what_is_truly_spent(gamma: float) -> None:
    sized = size_up(1.0, 1e-5, horizon=6, states=4, actions=2, users=1000, gamma=gamma)
    certificate = certificate_of(sized["lambda"], 1e-5, horizon=6, gamma=gamma, participations=1)
    assert sized["epsilon"] == 1.0
    assert sized["true_epsilon"] == pytest.approx(certificate.epsilon, abs=1e-12)
    assert sized["true_epsilon"] != 1.0
    assert sized["paper"]["epsilon"] == sized["paper"]["true_epsilon"] == pytest.approx(0.0372, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1e-9, 1e-300])
def test_what_the_paper_cannot_draw_does_not_hide_ours(epsilon: float) -> None:
    sized = size_up(epsilon, 1e-5, horizon=6, states=4, actions=2, users=1000, gamma=1.0)
    assert sized["lambda"] == pytest.approx(3.5e10, rel=0.01)
    unknown = {key for key, value in sized["paper"].items() if value is None}
    assert unknown == {"epsilon", "true_epsilon", "lambda", "noise_sd", "messages_per_user"}


def test_noise_that_cannot_be_drawn_for_few_honest_users_is_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match="epsilon is 1e-09 and delta 1e-08"):
        size_up(1e-9, 1e-8, horizon=6, states=4, actions=2, users=1000, gamma=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": -1.0}, "epsilon is -1"),
        ({"delta": 0.0}, "delta is 0"),
        ({"gamma": 0.0}, "gamma is 0"),
        ({"horizon": 0}, "horizon is 0"),
        ({"users": 0}, "users is 0"),
    ],
)
def test_bad_sizes_are_refused(changes: dict[str, float], message: str) -> None:
    fields = {"epsilon": 1.0, "delta": 1e-5, "horizon": 6, "states": 4, "actions": 2, "users": 100, "gamma": 1.0}
    with pytest.raises(InvalidInputError, match=message):
        size_up(**(fields | changes))  # type: ignore[arg-type]


def test_a_delta_below_the_accountants_floor_is_refused() -> None:
    with pytest.raises(AccountingError, match="below"):
        size_up(1.0, 1e-14, horizon=6, states=4, actions=2, users=100, gamma=1.0)
