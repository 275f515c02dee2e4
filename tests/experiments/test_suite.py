"""The suite is what it says it is, and its report says what the results say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shufflerl import envs
from shufflerl.errors import InvalidInputError, UnknownNameError
from shufflerl.experiments import store
from shufflerl.experiments.cells import Cell, Result, canonical, run_cell
from shufflerl.experiments.suite import __main__ as command
from shufflerl.experiments.suite import analysis, definition, show
from shufflerl.experiments.suite import analysis as tuning
from shufflerl.experiments.suite.analysis import analyse
from shufflerl.mdp import MDP
from shufflerl.planning import policy_values
from tests.support.examples import random_mdp


def test_at_least_twelve_environments_none_of_which_was_tuned_on() -> None:
    reported = {canonical(environment) for environment in definition.ENVIRONMENTS.values()}
    tuned = {canonical(environment) for environment in definition.TUNING.values()}
    assert len(reported) == len(definition.ENVIRONMENTS) >= 12
    assert not reported & tuned


@pytest.mark.parametrize("name", definition.ENVIRONMENTS)
def test_every_environment_can_be_learned_by_its_truth(name: str) -> None:
    env, parameters = definition.ENVIRONMENTS[name]
    first, second = (envs.make(env, seed, **parameters) for seed in (0, 1))
    assert isinstance(first, MDP)
    assert isinstance(second, MDP)
    # Seeds may rename actions, never change the problem: regrets of all seeds are of one and the same.
    assert first.optimal_value == pytest.approx(second.optimal_value)
    assert analysis.random_value(first) == pytest.approx(analysis.random_value(second))
    assert analysis.random_value(first) < 0.95 * first.optimal_value


def test_cells_are_all_combinations_once() -> None:
    cells = definition.cells(episodes=[20_000, 200_000], contenders=["SDP-PE", "UCBVI-JDP"], seeds=3)
    assert len(cells) == len({cell.key for cell in cells}) == 2 * 14 * 5 * 2 * 3
    for cell in cells:
        setting = cell.setting
        assert (setting.privatizer == "none") == (setting.epsilon is None)
        assert cell.seed < definition.FIRST_TUNING_SEED
        if setting.learner == "ucbvi":
            assert setting.episodes / setting.learner_parameters["batch"] <= 20_000
    assert all(cell.seed >= definition.FIRST_TUNING_SEED for cell in definition.tuning_cells(20_000, 1))


def test_what_was_tuned_on_is_not_reported() -> None:
    with pytest.raises(InvalidInputError, match="those beyond were tuned on"):
        definition.cells(seeds=20_000)
    with pytest.raises(InvalidInputError, match="expected one of those tuned at: 20000, "):
        definition.tuning_cells(777, 1)
    with pytest.raises(UnknownNameError, match="no contender 'ucbvi'"):
        definition.cells(contenders=["ucbvi"], seeds=1)


def test_acting_at_random_is_the_mean_over_all_policies() -> None:
    mdp = random_mdp(3, horizon=2, states=2, actions=2)
    policies = np.array(list(np.ndindex(*[2] * 4)), dtype=np.int32).reshape(-1, 2, 2)
    mean = policy_values(mdp.transitions, mdp.rewards, mdp.start, policies).mean()
    assert analysis.random_value(mdp) == pytest.approx(mean)


def made(environment: str, contender: str, epsilon: float | None, regrets: list[float]) -> list[Result]:
    """Results with these shares of the regret of acting at random."""
    place = definition.ENVIRONMENTS[environment]
    setting = definition.CONTENDERS[contender].setting(place, epsilon, 20_000)
    mdp = setting.environment(0)
    assert isinstance(mdp, MDP)
    never = 20_000 * (mdp.optimal_value - analysis.random_value(mdp))
    return [
        Result(Cell(setting, seed), share * never, 5, mdp.optimal_value, 0.1, (0.0, share * never), None, 0.5)
        for seed, share in enumerate(regrets)
    ]


@pytest.fixture
def results() -> list[Result]:
    return [
        *made("bandit", "optimistic", 1.0, [0.1, 0.1, 0.4]),
        *made("bandit", "SDP-PE", 1.0, [0.4, 0.4, 0.4]),
        *made("DeepSea 7", "optimistic", 1.0, [0.81, 0.9, 0.9]),
        *made("DeepSea 7", "SDP-PE", 1.0, [1.0, 0.9, 0.95]),
        *made("bandit", "optimistic", 5.0, [0.2, 0.2, 0.2]),
        *made("bandit", "SDP-PE", 5.0, [0.1, 0.1, 0.1]),
    ]


def test_the_report_marks_where_nobody_learns_and_keeps_the_worst(results: list[Result]) -> None:
    report = analyse(results)
    assert report.learners == ("optimistic", "SDP-PE")
    assert [contest.learned for contest in report.contests] == [True, False, True]
    line = report.contests[0].lines["optimistic"]
    never = report.contests[0].never
    assert line.regret.mean == pytest.approx(0.2 * never)
    assert (line.median, line.tail) == pytest.approx((0.1 * never, 0.37 * never))
    (standing,) = report.standings
    assert standing.ratio == pytest.approx(2.0), "at epsilon up to 1, where somebody learns"
    assert standing.ratio_everywhere == pytest.approx(np.sqrt(2.0 * 2.85 / 2.61))
    assert standing.worst == pytest.approx(0.5), "over all budgets"
    assert standing.worst_in is report.contests[2]
    assert report.longest_tail is not None
    assert report.longest_tail[0] == pytest.approx(3.7)
    assert [row["nobody_learns"] for row in report.rows()] == [False, False, True, True, False, False]


def test_table_and_figure(results: list[Result], tmp_path: Path) -> None:
    report = analyse(results)
    table, figure = show.save(report, tmp_path)
    text = table.read_text()
    assert "| DeepSea 7 | ε = 1 (nobody learns) |" in text
    assert "SDP-PE: 2.00 times the regret of the champion" in text
    assert "0.50 (bandit, ε = 5, K = 20,000)" in text
    assert figure.stat().st_size > 10_000


def test_a_report_without_the_champion_has_no_standings(results: list[Result]) -> None:
    report = analyse([result for result in results if result.cell.setting.learner == "sdp-pe"])
    assert report.standings == []
    assert report.longest_tail is None
    assert "champion" not in show.markdown(report)


def test_results_of_something_else_are_refused(results: list[Result]) -> None:
    other = replace(results[0].cell.setting, env_parameters={})
    with pytest.raises(InvalidInputError, match="is no run of the suite"):
        analyse([replace(results[0], cell=Cell(other, 0))])


def test_the_choice_of_constants_is_the_best_on_the_mean_of_ratios() -> None:
    def run(scale: float, place: str, regret: float) -> Result:
        setting = definition.CONTENDERS["UCBVI-JDP"].setting(definition.TUNING[place], 1.0, 20_000)
        chosen: dict[str, Any] = {"scale": scale, "batch": 10}
        cell = Cell(replace(setting, learner_parameters=chosen), 10_000)
        return Result(cell, regret, 0, 1.0, 0.5, None, None, 0.1)

    ranked = tuning.ranking(
        [run(0.1, "bandit", 10), run(0.1, "dense", 800), run(0.2, "bandit", 30), run(0.2, "dense", 400)]
    )
    assert [(choice["scale"], round(score, 3)) for choice, score in ranked[1.0]] == [(0.1, 1.414), (0.2, 1.732)]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cells = definition.cells(
        environments={"bandit": definition.ENVIRONMENTS["bandit"]},
        budgets=[None, 1.0],
        episodes=[300],
        contenders=["SDP-PE", "UCBVI-JDP"],
        seeds=2,
    )

    def run_here(cells: list[Cell], folder: Path, **_: Any) -> None:
        with store.Store(folder, cells) as there:
            for cell in cells:
                there.write(run_cell(cell))

    monkeypatch.setattr(command, "run_cells", run_here)
    monkeypatch.setattr(definition, "cells", lambda **_: cells)
    command.main(out=tmp_path, seeds=2)
    assert "K = 300, 2 seeds" in capsys.readouterr().out
    assert (tmp_path / "suite.png").exists()
    assert len(store.results(tmp_path / "results")) == 8
