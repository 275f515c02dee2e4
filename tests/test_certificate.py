from __future__ import annotations

import json
from typing import Any

import pytest

from shufflerl import privatizers
from shufflerl.counts import CountQuery
from shufflerl.errors import AccountingError, InvalidInputError
from shufflerl.learners.ucbvi import UCBVI
from shufflerl.privacy.certificate import ASSUMPTIONS, IMPLICATIONS, Certificate
from shufflerl.privacy.sizing import certificate_of, size_up
from tests.examples import random_mdp

PROBLEM = random_mdp(0, horizon=6, states=4).problem(1000)


def _certificate(name: str, **parameters: Any) -> Certificate:
    learner = UCBVI(PROBLEM, 0)
    privatizer = privatizers.make(name, learner, epsilon=1.0, delta=1e-5, seed=0, **parameters)
    certificate = privatizer.certificate(CountQuery.everything(PROBLEM))
    assert certificate is not None
    return certificate


@pytest.mark.parametrize("name", [name for name, _ in privatizers.PRIVATIZERS if name != "none"])
def test_text_and_json_say_the_same(name: str) -> None:
    certificate = _certificate(name)
    figures = json.loads(json.dumps(certificate.as_dict()))
    text = " ".join(str(certificate).split())
    assert f"({figures['epsilon']:.4g}, 1e-05)-differential privacy in the {figures['model']} model" in text
    assert figures["mechanism"] in text
    assert figures["neighbours"] in text
    assert figures["implies"] in text
    for assumption, meaning in figures["assumptions"].items():
        assert f"{assumption}: {meaning}" in text
    assert figures["epsilon"] <= figures["budget_epsilon"] + 1e-9


def test_models_of_trust_name_whom_they_trust() -> None:
    assert "honest shuffler" in _certificate("shuffle").assumptions
    assert "trusted server" in _certificate("central").assumptions
    local = _certificate("local")
    assert not {"honest shuffler", "trusted server"} & set(local.assumptions)
    assert set(IMPLICATIONS) == {"shuffle", "central", "local"}
    used = {name for kind in ("shuffle", "central", "local") for name in _certificate(kind).assumptions}
    assert used == set(ASSUMPTIONS)


def test_a_given_noise_is_certified_for_what_it_is() -> None:
    sized = size_up(1.0, 1e-5, horizon=6, states=4, actions=2, users=1000, gamma=1.0)
    certificate = certificate_of(sized["lambda"], 1e-5, horizon=6, gamma=1.0, participations=1)
    assert certificate.epsilon == pytest.approx(1.0, abs=1e-3)
    assert certificate.changed_counters == 22
    weaker = certificate_of(sized["lambda"], 1e-5, horizon=6, gamma=0.5, participations=1)
    twice = certificate_of(sized["lambda"], 1e-5, horizon=6, gamma=1.0, participations=2)
    assert weaker.epsilon == pytest.approx(twice.epsilon, rel=0.02)  # half the noise or twice the exposure
    assert weaker.epsilon > 1.35


def test_sizes_for_a_paper_sized_problem() -> None:
    sized = size_up(1.0, 1e-5, horizon=6, states=4, actions=2, users=1000, gamma=1.0)
    assert sized["noise_sd"] == pytest.approx(17.5, abs=0.05)
    assert sized["paper"]["noise_sd"] == pytest.approx(354, abs=0.5)
    assert sized["messages_per_user"] == pytest.approx(11 + 256 * sized["lambda"] / 1000)
    wider = size_up(1.0, 1e-5, horizon=6, states=4, actions=2, users=1000, gamma=0.5)
    assert wider["lambda"] == pytest.approx(2 * sized["lambda"])


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
