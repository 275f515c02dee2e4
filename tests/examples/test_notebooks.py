"""The notebooks run, cell by cell in this process, and what they end with shows itself."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shufflerl import CountPopulation, envs, learn, learners, privatizers
from shufflerl.mdp import MDP, Mixture

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


def run(source: str, space: dict[str, Any]) -> Any:
    """What a cell ends with, as a notebook would show it."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), space)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), space)  # type: ignore[attr-defined]


@pytest.mark.slow(4)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells), "kept without outputs"
    shown = [run("".join(cell["source"]), main.__dict__) for cell in cells]
    rich = [value for value in shown if hasattr(value, "_repr_html_") or hasattr(value, "_repr_png_")]
    for value in rich:
        assert value._repr_png_() if hasattr(value, "_repr_png_") else value._repr_html_()
    assert rich, "something to look at"


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["learn-and-plot", "read-a-certificate", "your-own-learner"]


def test_values_show_themselves() -> None:
    mdp = envs.make("riverswim", n_states=3)
    assert isinstance(mdp, MDP)
    shown = mdp._repr_html_()
    assert "<th>h=5</th>" in shown
    assert f"{mdp.optimal_value:.4f}" in shown
    learner = learners.make("ucbvi", mdp.problem(50), 0, batch=25)
    history = learn(learner, CountPopulation(mdp, 0), privatizers.make("none"))
    assert "<polyline" in history._repr_html_()
    assert f"<td style='text-align:left'>{history.distinct}</td>" in history._repr_html_()
    half = Mixture([[[0, 1]], [[1, 1]]], [0.25, 0.75])
    assert "Mixture of 2 policies" in half._repr_html_()
    assert "opacity:0.81" in half._repr_html_()
    assert "too large to show" in Mixture.single([[0] * 99])._repr_html_()
    cliff = envs.make("gymnasium", id="CliffWalking-v1", horizon=14)
    assert isinstance(cliff, MDP)
    assert "-13.0000 in its own units" in cliff._repr_html_()
