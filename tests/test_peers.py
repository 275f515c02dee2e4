"""What docs/peers.md says of others' noise."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from scipy.signal import fftconvolve
from scipy.special import gammaln, kve

PAGE = (Path(__file__).parents[1] / "docs" / "peers.md").read_text()
DRAWS, STEPS, DELTA = 10, 20, 1e-5
GAP, MOST = 0.01, 30.0  # of losses: a shift by s costs a Laplace draw of scale 1 at most s


def log_density(x: np.ndarray) -> np.ndarray:
    """Of the sum of ten Laplace draws of scale 1, a symmetric variance-gamma law."""
    order, x = DRAWS - 0.5, np.maximum(np.abs(x), 1e-9)
    scale = 0.5 * np.log(np.pi) + order * np.log(2) + gammaln(DRAWS)
    return np.asarray(order * np.log(x) + np.log(kve(order, x)) - x - scale)


def losses(shift: float) -> np.ndarray:
    """Probabilities of the privacy loss of one count that moves by `shift`, rounded up to multiples of the gap."""
    x = np.linspace(-80, 120, 100_001)
    weights = np.exp(log_density(x))
    cells = np.ceil((log_density(x) - log_density(x - shift)) / GAP).astype(int) + round(MOST / GAP)
    return np.bincount(cells, weights / weights.sum(), minlength=2 * round(MOST / GAP) + 1)


def test_a_release_of_the_trusted_servers_variant_is_worth_what_the_page_says() -> None:
    """A user who stays in a state moves two counts by all its steps, and two of next states by one less."""
    grid = np.linspace(-80, 80, 100_001)
    np.testing.assert_allclose(np.trapezoid(np.exp(log_density(grid)) * grid**2, grid), 2 * DRAWS, rtol=1e-6)
    visits, moves = losses(STEPS), losses(STEPS - 1)
    total = fftconvolve(fftconvolve(visits, visits), fftconvolve(moves, moves))
    loss = GAP * np.arange(len(total)) - 4 * MOST

    def delta(epsilon: float) -> float:
        beyond = loss > epsilon
        return float((total[beyond] * -np.expm1(epsilon - loss[beyond])).sum())

    found = re.search(r"\*one\* such release is worth ε = (\d+) at δ = 1e-5", PAGE)
    assert found is not None
    assert delta(float(found[1]) - 0.5) > DELTA > delta(float(found[1]) + 0.5)
