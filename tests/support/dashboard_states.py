"""Pages in any state, for tests that look at them: the real page and events, fed with what a server would tell."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, sync_playwright
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shufflerl.network.web import http
from shufflerl.network.web.watching import LivePage

#: What Chromium is told: no GPU, nobody to call.
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]

CERTIFICATE = {
    "epsilon": 2.9998,
    "delta": 1e-5,
    "budget_epsilon": 3.0,
    "model": "shuffle",
    "mechanism": "one sealed tag per family and step; dummies by the shuffler and noise by the coordinator",
    "against": "The coordinator: the shuffler's dummies. The shuffler: the coordinator's noise.",
    "noise_sd": 17.3,
    "noise_on": "on every counter of every batch",
    "changed_counters": 30,
    "participations": 1,
    "spent": 2.9998,
    "neighbours": "Two runs are neighbours if one user's whole trajectory is replaced by any other.",
    "implies": "Shuffle privacy implies joint differential privacy (billboard lemma).",
    "assumptions": {"unique users": "A user takes part once.", "separate servers": "They do not collude."},
}


def chromium() -> str | None:
    """Where Chromium is, by any of its names."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@contextmanager
def browser() -> Iterator[Browser]:
    """Chromium, or a skipped test that says how to get it."""
    where = chromium()
    if where is None:
        pytest.skip("There is no Chromium here; get it with: apt-get install chromium (make test tries that as root).")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=where, args=ARGUMENTS)
        try:
            yield started
        finally:
            started.close()


@dataclass
class Stage:
    """A page's server that tells what it is told to."""

    page: str
    parts: dict[str, Any] = field(default_factory=dict)

    @property
    def app(self) -> Starlette:
        watching = LivePage(self.page, self._look)
        app = Starlette(routes=[*watching.routes, Route("/v1/certificate", _certificate)])
        app.state.watching = watching
        http.answers_problems(app, "server")
        return app

    async def _look(self) -> dict[str, Any]:
        return self.parts


async def _certificate(_: Request) -> Response:
    return http.as_json(CERTIFICATE)


def heard(state: str, accepted: int, users: int = 1200, batch: int = 6, **more: Any) -> dict[str, Any]:
    """What the shuffler says of a batch."""
    said = {"batch": batch, "attempt": 0, "state": state, "users": users, "accepted": accepted, "chunks": 0}
    return said | {"extensions": 0, "seconds_left": 2711.0} | more


def status(**changes: Any) -> dict[str, Any]:
    """A run in the middle of filling its seventh batch."""
    now: dict[str, Any] = {
        "task": "8c8a26af1a1e4181fff55b8d463901fd",
        "learner": "optimistic",
        "episodes": 20_000,
        "episodes_played": 4_180,
        "finished": False,
        "batch": 6,
        "attempt": 0,
        "batches_learned": 6,
        "messages": 395_293,
        "invalid_messages": 4,
        "epsilon_spent": 2.9998,
        "epsilon_budget": 3.0,
        "delta": 1e-5,
        "noise": "servers",
        "shuffler": "http://127.0.0.1:8742",
        "shuffler_says": heard("open", 812),
        "trouble": None,
        "why": "Batch 6 waits for users: 812 of 1,200 reports are in, 388 are missing. In 45 min its time is up.",
        "seconds": 12.5,
        "started": 1000.0,
        "seal_to_release_at_most": 0.31,
        "release_to_learned": 1.94,
    }
    return now | changes


def learned(
    batches: int = 6, *, mixture: bool = False, states: int = 6, actions: int = 3, **more: Any
) -> dict[str, Any]:
    """What a learner has to tell after so many batches."""
    rng = np.random.default_rng(batches)
    steps = 8
    history = [
        {
            "batch": b,
            "value": v,
            "low": v - w,
            "high": min(8.0, v + w),
            "description": "of the policy played now, thereabouts",
            "users": 100 * (b + 1),
            "arms": None,
        }
        for b in range(batches)
        for v, w in [(4.2 + 1.1 * float(rng.normal()) / (b + 1), 3.0 / (b + 1) ** 0.8)]
    ]
    estimate = history[-1] if history else None
    told: dict[str, Any] = {
        "batches": batches,
        "max_batches": 16,
        "stages": None,
        "log2_policies": None,
        "log2_all_policies": steps * states * float(np.log2(actions)),
        "decided": None,
        "switches": max(0, batches - 2),
        "changed_actions": 5 if batches else None,
        "estimate": estimate and {key: estimate[key] for key in ("value", "low", "high", "description")},
        "history": history,
        "search": {},
        "returns": False,
        "policy": {
            "family": "table",
            "steps": steps,
            "states": states,
            "actions": actions,
            "policies": 24 if mixture else 1,
            "action": rng.integers(actions, size=(steps, min(states, 100))).tolist(),
            "share": (
                rng.uniform(0.4, 1, size=(steps, min(states, 100))) if mixture else np.ones((steps, min(states, 100)))
            )
            .round(4)
            .tolist(),
        },
    }
    return told | more


def searched(batches: int = 30, *, hidden: bool = False, committed: bool = False) -> dict[str, Any]:
    """What a search of policies has to tell, by returns from 0 to 500."""
    rng = np.random.default_rng(batches)
    values = 500 / (1 + np.exp(4 - 0.3 * np.arange(batches)))
    history = [
        {
            "batch": b,
            "users": 48 * (b + 1),
            "arms": np.clip(value + 60 * rng.normal(size=12), 0, 500).round(1).tolist(),
            "value": float(value),
            "low": max(0.0, float(value) - 20),
            "high": min(500.0, float(value) + 20),
            "description": "of the policies that users play, all together; two standard errors of a batch on each side",
        }
        for b, value in enumerate(values)
    ]
    policies = 1 if committed else 12
    network: dict[str, Any] = {"family": "linear", "policies": policies, "inputs": 4, "actions": 2, "head": "choice"}
    if hidden:
        network |= {"family": "mlp", "parameters": 97, "layers": [4, 16, 1], "columns": ["Numbers", "Size", "Apart"]}
        layers = {"4 to 16": 80, "16 to 1": 17}
        rows = [{"name": name, "cells": [[n, None], [0.813, None], [0.22, None]]} for name, n in layers.items()]
    else:
        network |= {"parameters": 5, "layers": [4, 1], "columns": [*(f"Input {i}" for i in range(4)), "Bias"]}
        rows = [{"name": "Action 1", "cells": [[float(x), 0.31] for x in (0.42, 1.2, 6.1, -2.3, 0.01)]}]
    estimate = {key: history[-1][key] for key in ("value", "low", "high", "description")} if history else None
    found = {"history": history, "estimate": estimate, "policy": network | {"rows": rows}, "log2_all_policies": None}
    phase = "commit" if committed else "search"
    search = {"phase": phase, "parameters": network["parameters"], "reliability": 0.71 if batches else None}
    return learned(batches) | found | {"search": search, "returns": True, "changed_actions": None, "max_batches": 101}


def scored() -> dict[str, Any]:
    """What a contextual bandit has to tell of six tiles of eight channels."""
    cells = [[[round(0.12 * x + 0.02 * a, 3), 0.05] for a in range(8)] for x in range(6)]
    policy = {"family": "scores", "policies": 32, "inputs": 8, "actions": 8, "parameters": 48, "head": "scores"}
    policy |= {"layers": [], "columns": [f"Action {a}" for a in range(8)]}
    policy["rows"] = [{"name": f"State {x}", "cells": row} for x, row in enumerate(cells)]
    return learned() | {"policy": policy, "changed_actions": None}


#: The coordinator's page in every state it has.
COORDINATOR: dict[str, dict[str, Any]] = {
    "waiting": {
        "status": status(
            batch=0,
            batches_learned=0,
            episodes_played=0,
            messages=0,
            invalid_messages=0,
            epsilon_spent=0.0,
            shuffler_says=heard("open", 0, 100, 0),
            seal_to_release_at_most=None,
            release_to_learned=None,
            why="Batch 0 waits for users: 0 of 100 reports are in, 100 are missing. In 60 min its time is up.",
        ),
        "learned": learned(0),
    },
    "filling": {"status": status(), "learned": learned()},
    "mixing": {
        "status": status(
            shuffler_says=heard("sealed", 1200),
            why="Batch 6 is sealed; its 1,200 reports are being mixed, opened or counted.",
        ),
        "learned": learned(),
    },
    "eliminating": {
        "status": status(learner="sdp-pe"),
        "learned": learned(mixture=True, stages=(6, 9), log2_policies=21.3, decided=19),
    },
    "scoring": {"status": status(learner="contextual-bandit"), "learned": scored()},
    "searching": {"status": status(learner="policy-search"), "learned": searched()},
    "searching-networks": {"status": status(learner="policy-search"), "learned": searched(hidden=True)},
    "settled": {
        "status": status(learner="policy-search", finished=True, batch=None, attempt=None),
        "learned": searched(committed=True),
    },
    "unsearched": {
        "status": status(learner="policy-search", batch=0, batches_learned=0),
        "learned": searched(0),
    },
    "finished": {
        "status": status(
            finished=True,
            batch=None,
            attempt=None,
            batches_learned=15,
            episodes_played=20_000,
            why="The run is over: every episode was played.",
        ),
        "learned": learned(15),
    },
    "trouble": {
        "status": status(
            trouble="ProblemError: The shuffler refuses: The disk of shuffler.db is full.",
            why="The last step failed and is tried again: ProblemError: The shuffler refuses: The disk of shuffler.db "
            "is full; nothing was stored. Make room; it is tried again.",
        ),
        "learned": learned(),
    },
    "unheard": {
        "status": status(shuffler_says=None, why="Batch 6 is being announced to the shuffler."),
        "learned": learned(states=1000, actions=14),
    },
}

#: And the shuffler's.
SHUFFLER: dict[str, dict[str, Any]] = {
    "taking": {
        "status": {
            "started": 1000.0,
            "batches": [heard("open", 812), heard("sealed", 500, 500, 2, attempt=1, extensions=2)],
            "accepted": 4_992,
            "refused": {"duplicate": 3, "late": 12, "unauthorized": 1},
            "dummies": 56_000.0,
            "queued": 4,
            "released": 6,
            "release_seconds": 0.041,
            "trouble": None,
        }
    },
    "idle": {
        "status": {
            "started": 1000.0,
            "batches": [],
            "accepted": 0,
            "refused": {},
            "dummies": 0.0,
            "queued": 0,
            "released": 0,
            "release_seconds": None,
            "trouble": None,
        }
    },
}
SHUFFLER["trouble"] = {
    "status": SHUFFLER["taking"]["status"] | {"trouble": "The disk of shuffler.db is full; nothing was stored."}
}
