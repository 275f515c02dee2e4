"""What the coordinator's page shows of its learner: functions of releases, like all that a coordinator has."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from shufflerl.mdp import Problem
from shufflerl.network.coordinator.coordinator import Coordinator

#: States of the policy and batches of the chart that a page is sent.
MAX_STATES, MAX_POINTS = 100, 200


def learned(run: Coordinator) -> dict[str, Any]:
    """What the coordinator's page shows of the learner: it changes with every batch learned from."""
    learner, view, outcomes = run.learner, run.learner.view(), run.outcomes
    problem, details = learner.problem, view.details
    assert isinstance(problem, Problem)
    points = [{"batch": one["batch"], **one["estimate"]} for one in outcomes if one["estimate"] is not None]
    return {
        "batches": len(outcomes),
        "most_batches": learner.most_batches,
        "stages": details.get("stages"),
        "log2_policies": details.get("log2_policies"),
        "log2_all_policies": problem.horizon * problem.n_states * math.log2(problem.n_actions),
        "decided": sum(row.count(1) for row in details["actions"]) if "actions" in details else None,
        "switches": sum(one["switched"] for one in outcomes),
        "changed_actions": outcomes[-1]["changed_actions"] if outcomes else None,
        "estimate": None if view.estimate is None else asdict(view.estimate),
        "history": points[:: -max(1, -(-len(points) // MAX_POINTS))][::-1],
        "policy": _policy(run),
    }


def _policy(run: Coordinator) -> dict[str, Any]:
    """The policy played now, as the likeliest action of every step and state."""
    mixture, problem = run.learner.playing, run.learner.problem
    assert isinstance(problem, Problem)
    assert mixture is not None  # the first batch is planned before anything is shown
    action, share = mixture.modal_policy()
    return {
        "steps": problem.horizon,
        "states": problem.n_states,
        "actions": problem.n_actions,
        "policies": len(mixture.weights),
        "action": action[:, :MAX_STATES].tolist(),
        "share": share[:, :MAX_STATES].round(4).tolist(),
    }
