"""Compile the kernels once, before several workers, and roles that they start, would: `python -m tests.compile`.

Every registered learner runs on a small problem and tells what it believes: without noise and with it, knowing the law
of the first state and not. Then all that tests and roles use comes from numba's cache, but for what a test calls with
arrays of its own.
"""

from __future__ import annotations

from typing import Any

from shufflerl.experiment import Setting, prepare
from shufflerl.learners import LEARNERS
from shufflerl.loop import learn

_TABLE: dict[str, Any] = {"env": "riverswim", "env_parameters": {"n_states": 3, "horizon": 3}}
_GYM: dict[str, Any] = {"env": "gymnasium", "env_parameters": {"id": "shufflerl/RiverSwim-v0", "horizon": 3}}
_PAPER: dict[str, Any] = {"learner": "sdp-pe", "learner_parameters": {"constants": "paper"}}
_PRIVATE: dict[str, Any] = {"privatizer": "shuffle", "epsilon": 1.0, "delta": 1e-5}


def settings() -> list[Setting]:
    """What is run."""
    kinds = [{"learner": name, **_TABLE} for name, _ in LEARNERS]
    kinds += [{"learner": name, **_GYM} for name, _ in LEARNERS if name != "sdp-pe"]  # which needs the law
    kinds += [{**_PAPER, **_TABLE}]
    return [Setting(episodes=200, **kind, **noise) for kind in kinds for noise in ({"privatizer": "none"}, _PRIVATE)]


def main() -> None:
    """Run them all."""
    for setting in settings():
        made = prepare(setting, 0)
        learn(made.learner, made.population, made.privatizer)
        made.learner.view()


if __name__ == "__main__":
    main()
