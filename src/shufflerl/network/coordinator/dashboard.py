"""What the coordinator's page shows of its learner: functions of releases, like all that a coordinator has."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict
from typing import Any

import numpy as np

from shufflerl.mdp import Mixture, Problem
from shufflerl.network.coordinator.coordinator import Coordinator
from shufflerl.policies import Network, Scores
from shufflerl.returns import ReturnProblem

#: States of the policy and batches of the chart that a page is sent, and inputs of a linear policy.
MAX_STATES, MAX_POINTS, MAX_INPUTS = 100, 200, 12


def learned(run: Coordinator) -> dict[str, Any]:
    """What the coordinator's page shows of the learner: it changes with every batch learned from."""
    learner, view, outcomes = run.learner, run.learner.view(), run.store.outcomes
    problem, details = learner.problem, view.details
    played = itertools.accumulate(one["users"] for one in outcomes)
    points = [
        {"batch": one["batch"], "users": users, "arms": one["arms"] and _short(one["arms"]), **one["estimate"]}
        for one, users in zip(outcomes, played, strict=True)
        if one["estimate"] is not None
    ]
    log2_all = None
    if isinstance(problem, Problem):
        log2_all = problem.horizon * problem.n_states * math.log2(problem.n_actions)
    return {
        "batches": len(outcomes),
        "max_batches": learner.max_batches,
        "stages": details.get("stages"),
        "log2_policies": details.get("log2_policies"),
        "log2_all_policies": log2_all,
        "decided": sum(row.count(1) for row in details["actions"]) if "actions" in details else None,
        "search": {name: details[name] for name in ("phase", "reliability", "parameters") if name in details},
        "returns": isinstance(problem, ReturnProblem),
        "switches": sum(one["switched"] for one in outcomes),
        "changed_actions": outcomes[-1]["changed_actions"] if outcomes else None,
        "estimate": None if view.estimate is None else asdict(view.estimate),
        "history": points[:: -max(1, -(-len(points) // MAX_POINTS))][::-1],
        "policy": _policy(run),
    }


def _short(numbers: list[float]) -> list[float]:
    """As many digits as can be drawn."""
    return [float(f"{number:.4g}") for number in numbers]


def _policy(run: Coordinator) -> dict[str, Any]:
    """The policy played now: the likeliest action of every step and state, or what a network is made of."""
    mixture, problem = run.learner.playing, run.learner.problem
    assert mixture is not None  # the first batch is planned before anything is shown
    if isinstance(mixture.family, Network):
        return _network(mixture, mixture.family)
    if isinstance(mixture.family, Scores):
        return _scores(mixture, mixture.family)
    assert isinstance(problem, Problem)
    action, share = mixture.modal_policy()
    return {
        "family": "table",
        "steps": problem.horizon,
        "states": problem.n_states,
        "actions": problem.n_actions,
        "policies": len(mixture.weights),
        "action": action[:, :MAX_STATES].tolist(),
        "share": share[:, :MAX_STATES].round(4).tolist(),
    }


def _scores(mixture: Mixture, family: Scores) -> dict[str, Any]:
    """Scores of states (rows) and actions (columns) as [mean, deviation] over the policies."""
    policies = mixture.policies.astype(np.float64)
    mean = np.tensordot(mixture.weights, policies, axes=1)
    deviation = np.sqrt(np.tensordot(mixture.weights, (policies - mean) ** 2, axes=1))
    rows = [
        {"name": f"State {x}", "cells": [[float(v), float(d)] for v, d in zip(mean[x], deviation[x], strict=True)]}
        for x in range(min(family.states, MAX_STATES))
    ]
    shown = {"family": family.kind, "policies": len(policies), "inputs": family.actions, "actions": family.actions}
    shown |= {"parameters": family.states * family.actions, "head": "scores", "layers": []}
    return shown | {"columns": [f"Action {a}" for a in range(family.actions)], "rows": rows}


def _network(mixture: Mixture, family: Network) -> dict[str, Any]:
    """Layers of a network as rows of [mean, deviation] over the policies; a linear one, weight by weight."""
    policies = mixture.policies.astype(np.float64)
    mean = mixture.weights @ policies
    deviation = np.sqrt(mixture.weights @ (policies - mean) ** 2)
    shown = {"family": family.kind, "policies": len(policies), "inputs": family.inputs, "parameters": family.size}
    shown |= {"actions": family.actions, "head": family.head, "layers": list(family.layers)}
    if family.hidden or family.layers[0] > MAX_INPUTS:
        return shown | {"columns": ["Numbers", "Size", "Apart"], "rows": _layers(family, mean, deviation)}
    inputs, outputs = family.layers
    # weights[input, output], then the biases: one row for each output.
    values, apart = (numbers.reshape(inputs + 1, outputs).T for numbers in (mean, deviation))
    names = {"choice": "Action", "box": "Coordinate", "score": "Any"}[family.head]
    first = 1 if family.head == "choice" else 0
    rows = [
        {
            "name": names if family.head == "score" else f"{names} {first + output}",
            "cells": [[float(v), float(d)] for v, d in zip(values[output], apart[output], strict=True)],
        }
        for output in range(min(outputs, MAX_STATES))
    ]
    return shown | {"columns": [*(f"Input {i}" for i in range(inputs)), "Bias"], "rows": rows}


def _layers(family: Network, mean: np.ndarray[Any, Any], deviation: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    rows, start = [], 0
    for before, after in itertools.pairwise(family.layers):
        part = slice(start, start := start + (before + 1) * after)
        sizes = [float(np.sqrt(np.mean(numbers[part] ** 2))) for numbers in (mean, deviation)]
        rows.append(
            {"name": f"{before} to {after}", "cells": [[(before + 1) * after, None], *([s, None] for s in sizes)]}
        )
    return rows
