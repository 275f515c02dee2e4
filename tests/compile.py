"""Compile the kernels once, before several workers, and roles that they start, would: `python -m tests.compile`.

Every registered learner runs on a small problem and tells what it believes: without noise and with it, knowing the law
of the first state and not. Then all that tests and roles use comes from numba's cache, but for what a test calls with
arrays of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shufflerl.experiments.setting import Setting, prepare
from shufflerl.learners import LEARNERS
from shufflerl.loop import learn

_TABLE: dict[str, Any] = {"env": "riverswim", "env_parameters": {"n_states": 2, "horizon": 2}}
_GYM: dict[str, Any] = {"env": "gymnasium", "env_parameters": {"id": "shufflerl/RiverSwim-v0", "horizon": 2}}
_NOISE: list[dict[str, Any]] = [
    {"privatizer": "none"},
    {"privatizer": "shuffle", "epsilon": 1.0, "delta": 1e-5},
]


def settings() -> Iterator[Setting]:
    """What is run."""
    for learner in (name for name, _ in LEARNERS if name != "contextual-bandit"):  # that has no kernels of its own
        for place in (_TABLE,) if learner == "sdp-pe" else (_TABLE, _GYM):  # it needs the law
            for noise in _NOISE:
                yield Setting(learner=learner, episodes=200, **place, **noise)
    for policies in ("enumerated", "product"):  # the paper's constants eliminate nothing before
        paper = {"constants": "paper", "policies": policies}
        yield Setting(learner="sdp-pe", learner_parameters=paper, privatizer="none", episodes=10**12, **_TABLE)


def main() -> None:
    """Run them all."""
    for setting in settings():
        made = prepare(setting, 0)
        learn(made.learner, made.population, made.privatizer)
        made.learner.view()


if __name__ == "__main__":
    main()
