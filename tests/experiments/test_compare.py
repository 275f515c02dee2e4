from __future__ import annotations

import importlib.util
import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats

from shufflerl.arrays import FloatArray
from shufflerl.errors import InvalidInputError, UnknownNameError
from shufflerl.experiments import chart, compare, store
from shufflerl.experiments.cells import Cell, Result, curve_episodes
from shufflerl.experiments.setting import Setting
from shufflerl.results import load
from tests.support import commands

EPISODES = 400


def setting(scale: float, **changes: object) -> Setting:
    base = Setting("riverswim", "ucbvi", "none", EPISODES, learner_parameters={"scale": scale})
    return replace(base, **changes)  # type: ignore[arg-type]


def made(of: Setting, regrets: FloatArray, first: int = 0) -> list[Result]:
    """Results with straight regret curves."""
    grid = np.array(curve_episodes(of.episodes)) / of.episodes
    return [
        Result(Cell(of, first + seed), float(r), 2, 0.5, 0.5 - r / of.episodes, tuple((grid * r).tolist()), None, 0.1)
        for seed, r in enumerate(regrets)
    ]


@pytest.fixture(scope="module")
def results() -> list[Result]:
    rng = np.random.default_rng(1)
    luck = rng.normal(0, 10, 16)  # of a seed, shared by all: only paired tests see through it
    scales = {0.1: 120, 0.2: 100, 0.3: 100.5}
    return [r for scale, mean in scales.items() for r in made(setting(scale), mean + luck + rng.normal(0, 2, 16))]


def test_a_group_is_sorted_tested_and_measured(results: list[Result]) -> None:
    (group,) = compare.compare(results)
    assert group.title == "riverswim, 400 episodes"
    assert group.measure == "regret"
    first, second, third = group.rows
    assert first.setting.learner_parameters["scale"] in (0.2, 0.3)
    assert third.setting.learner_parameters["scale"] == 0.1
    assert first.p_value is first.adjusted is None
    assert second.adjusted is not None
    assert third.adjusted is not None
    assert third.adjusted < 0.01
    assert second.adjusted > 0.1
    for row in group.rows:
        assert row.score.low is not None
        assert row.score.high is not None
        assert row.score.low < row.score.mean < row.score.high
        assert row.area is not None
        assert row.area.mean == pytest.approx(row.score.mean / 2)  # a straight curve
        assert row.sd == pytest.approx(np.std(row.scores, ddof=1))
        assert row.switches == 2


def test_the_same_results_give_the_same_figures(results: list[Result]) -> None:
    once, twice = ([group.as_dict() for group in compare.compare(results)] for _ in range(2))
    assert once == twice


def test_only_alike_problems_are_compared(results: list[Result]) -> None:
    others = made(setting(0.1, episodes=500), np.arange(16.0)) + made(setting(0.1, env="bandit"), np.arange(16.0))
    titles = [group.title for group in compare.compare([*results, *others])]
    assert titles == ["riverswim, 400 episodes", "riverswim, 500 episodes", "bandit, 400 episodes"]
    private = made(setting(0.1, privatizer="shuffle", epsilon=1.0, delta=1e-5), np.arange(16.0))
    assert [len(group.rows) for group in compare.compare([*results, *private])] == [4]
    groups = compare.compare([*results, *private], per_budget=True)
    assert [(len(group.rows), group.title.rsplit(", ", 1)[1]) for group in groups] == [
        (3, "no privacy"),
        (1, "epsilon 1"),
    ]


def test_settings_are_compared_on_the_seeds_that_all_have(results: list[Result]) -> None:
    (group,) = compare.compare(results[:-3])
    assert {row.seeds for row in group.rows} == {tuple(range(13))}
    with pytest.raises(InvalidInputError, match="no seed is common"):
        compare.compare([*results, *made(setting(0.7), np.arange(3.0), first=90)])


def test_where_regret_is_unknown_reward_takes_its_place(results: list[Result]) -> None:
    blind = [replace(result, regret=None, curve=None, optimal_value=None) for result in results]
    (group,) = compare.compare(blind)
    assert group.measure == "reward"
    assert group.rows[0].score.mean == max(row.score.mean for row in group.rows)
    assert group.rows[0].area is None
    with pytest.raises(InvalidInputError, match="no curves to plot"):
        chart.curves([group], "sd")
    with pytest.raises(InvalidInputError, match="neither regret nor reward"):
        compare.compare([replace(result, reward=None) for result in blind])


def test_a_single_seed_gives_means_and_claims_nothing() -> None:
    (group,) = compare.compare([*made(setting(0.1), np.array([5.0])), *made(setting(0.2), np.array([9.0]))])
    assert [row.adjusted for row in group.rows] == [None, 1.0]
    assert group.rows[0].score == compare.Estimate(5.0, None, None)
    assert group.rows[0].sd is None
    chart.curves([group], "ci").canvas.draw()


def test_equal_results_are_not_different() -> None:
    same = np.array([5.0, 6.0, 9.0])
    (group,) = compare.compare([*made(setting(0.1), same), *made(setting(0.2), same)])
    assert group.rows[1].adjusted == 1.0
    assert compare.interval(np.full(4, 3.3)) == compare.Estimate(3.3, 3.3, 3.3)


def test_the_permutation_test_is_exact_for_few_seeds() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.normal(0.8, 1, 8), rng.normal(0, 1, 8)
    differences = one - other
    sums = [abs((np.array(signs) * differences).sum()) for signs in itertools.product((-1, 1), repeat=8)]
    by_hand = np.mean(np.array(sums) >= abs(differences.sum()) - 1e-12)
    p = compare.paired_tests(np.array([one, other]))
    assert p[0, 1] == p[1, 0] == pytest.approx(by_hand)
    assert p[0, 0] == 1


def test_statistics_agree_with_scipys() -> None:
    """Intervals within the luck of resampling, 2% of their width; p-values within four standard errors."""
    rng = np.random.default_rng(4)
    for values in (rng.normal(5, 2, 20), rng.exponential(3, 12)):
        mine = compare.interval(values)
        theirs = stats.bootstrap((values,), np.mean, n_resamples=2**14, batch=1024, rng=rng).confidence_interval
        width = theirs.high - theirs.low
        assert mine.low == pytest.approx(theirs.low, abs=0.02 * width)
        assert mine.high == pytest.approx(theirs.high, abs=0.02 * width)
    one, other = rng.normal(0.5, 1, 20), rng.normal(0, 1, 20)
    p = compare.paired_tests(np.array([one, other]))[0, 1]
    exact = stats.permutation_test(
        (one, other), lambda x, y, axis: (x - y).mean(axis=axis), permutation_type="samples", vectorized=True,
        n_resamples=2**15, batch=1024, rng=rng,
    ).pvalue  # fmt: skip
    assert p == pytest.approx(exact, abs=4 * np.sqrt(exact / 2**14))


def test_holm_by_hand() -> None:
    assert compare.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert compare.holm([0.9, 0.8]) == [1.0, 1.0]
    assert compare.holm([]) == []


def test_the_smallest_p_possible_is_reached_when_the_best_wins_every_seed() -> None:
    rng = np.random.default_rng(0)
    for seeds in (4, 6):
        rows = [made(setting(0.1 * k), 100.0 * k + rng.random(seeds)) for k in (1, 2, 3)]
        (group,) = compare.compare(itertools.chain(*rows))
        assert group.rows[1].adjusted == pytest.approx(group.least_p_possible) == 3 * 2 / 2**seeds


@pytest.mark.slow
def test_a_claim_against_the_best_is_false_as_rarely_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four equal learners: in at most 5% of sweeps any of them is told apart from the best.

    Of 400 sweeps at most 33 then, but with probability 0.003 (binomial); all pairs being corrected for, about 12 are.
    Correcting only for the three tests against the best, which the data chose, is wrong in about 26: over 5%.
    """
    monkeypatch.setattr(compare, "RESAMPLES", 2**9)
    monkeypatch.setattr(compare, "interval", lambda values: compare.Estimate(float(values.mean()), None, None))
    rng, wrong, naive = np.random.default_rng(7), 0, 0
    for _ in range(400):
        luck = rng.normal(0, 3, 9)
        runs = [made(setting(0.1 * k, episodes=2), luck + rng.exponential(1, 9)) for k in (1, 2, 3, 4)]
        (group,) = compare.compare(itertools.chain(*runs))
        others = group.rows[1:]
        wrong += any(row.adjusted is not None and row.adjusted <= 0.05 for row in others)
        naive += min(compare.holm([row.p_value for row in others if row.p_value is not None])) <= 0.05
    assert stats.binom.sf(33, 400, 0.05) < 0.003
    assert wrong <= 33
    assert naive > 20 > wrong


@pytest.mark.slow
def test_intervals_cover_the_mean_about_as_often_as_they_say() -> None:
    """Of 300 intervals from 20 normal runs about 93% hold the truth (95% but for the bootstrap's own error)."""
    rng = np.random.default_rng(3)
    found = [compare.interval(rng.normal(5, 2, 20)) for _ in range(300)]
    covered = sum(e.low is not None and e.high is not None and e.low <= 5 <= e.high for e in found)
    # 0.93 within four standard errors.
    assert abs(covered / 300 - 0.93) < 4 * np.sqrt(0.93 * 0.07 / 300)


def test_bands_are_what_they_are_called() -> None:
    curves = np.random.default_rng(0).normal(10, 3, (400, 5))
    low, high = compare.band(curves, "sd")
    assert (high - low) / 2 == pytest.approx(curves.std(axis=0, ddof=1))
    low, high = compare.band(curves, "ci")
    assert (high - low) / 2 == pytest.approx(1.96 * curves.std(axis=0) / 20, rel=0.1)


def test_a_figure_says_which_band_it_shows_and_gives_a_learner_one_look(results: list[Result]) -> None:
    others = [r for scale in (0.3, 0.1) for r in made(setting(scale, env="bandit"), np.arange(16.0) + 100 * scale)]
    groups = compare.compare([*results, *others])
    for kind, words in (("sd", "± 1 standard deviation over seeds"), ("ci", "95% bootstrap interval of the mean")):
        figure = chart.curves(groups, "sd" if kind == "sd" else "ci")
        assert figure.get_suptitle() == f"mean of 16 seeds; band: {words}"
        looks: dict[object, set[object]] = {}
        for axes in figure.axes:
            for line in axes.get_lines():
                looks.setdefault(line.get_label(), set()).add(line.get_color())
        assert {len(colours) for colours in looks.values()} == {1}
        assert len(looks) == 3


@pytest.mark.slow
def test_the_command_prints_a_table_json_and_a_figure(
    results: list[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = partial(commands.call, capsys, monkeypatch)
    out = tmp_path / "out"
    with store.Store(out, [result.cell for result in results]) as opened:
        for result in results:
            opened.write(result)
    code, text, _ = call("compare", str(out), "--plot", str(tmp_path / "figure.svg"), "--band", "ci")
    assert code == 0
    assert "riverswim, 400 episodes, 16" in text
    assert "best" in text
    lines = [line for line in text.splitlines() if str(tmp_path) not in line]
    assert max(len(line.rstrip()) for line in lines) <= 81
    assert "interval of the mean" in (tmp_path / "figure.svg").read_text()
    kinds = {".csv": "problem,setting,seeds,mean", ".md": "| setting | regret |", ".tex": "\\begin{tabular}{lrrrr}"}
    for suffix, head in kinds.items():
        axes = ("--x", "learner.scale", "--log", "xy", "--plot", str(tmp_path / "scale.svg"))
        assert call("compare", str(out), "--table", str(tmp_path / f"table{suffix}"), *axes)[0] == 0
        assert head in (tmp_path / f"table{suffix}").read_text()
    assert "learner.scale" in (tmp_path / "scale.svg").read_text()
    assert "Use a name ending in .csv" in str(call("compare", str(out), "--table", "table.doc")[0])
    assert "no 'epsilo' in these results. Did you mean 'epsilon'?" in str(
        call("compare", str(out), "--plot", str(tmp_path / "x.svg"), "--x", "epsilo")[0]
    )
    table = load(out)
    assert table.num_rows == len(results)
    assert set(table["learner.scale"].to_pylist()) == {0.1, 0.2, 0.3}
    assert len(table.to_pandas()) == len(results) if importlib.util.find_spec("pandas") else True
    code, text, _ = call("compare", str(out), "--json")
    (group,) = json.loads(text)["groups"]
    best, *others = group["settings"]
    assert len(best["regret"]["per_seed"]) == 16
    assert best["p_adjusted"] is None
    assert all(row["p_adjusted"] >= row["p_value"] for row in others)
    assert "holds no results" in str(call("compare", str(tmp_path))[0])
    assert "Use a name ending in" in str(call("compare", str(out), "--plot", "figure.doc")[0])


def axis(figure: Figure, panel: int = 0) -> dict[str, list[float]]:
    """The x of every line of a panel."""
    lines = figure.axes[panel].get_lines()
    return {str(line.get_label()): np.round(line.get_xdata(), 9).tolist() for line in lines}  # type: ignore[arg-type]


def test_any_axis_any_facet() -> None:
    """Lines run through settings that differ in x alone; what has no x is level; labels say what differs."""
    runs = []
    for epsilon, scale, env in itertools.product((None, 0.5, 1.0), (0.1, 0.2), ("riverswim", "bandit")):
        privacy = {} if epsilon is None else {"privatizer": "shuffle", "epsilon": epsilon, "delta": 1e-5}
        runs += made(setting(scale, env=env, **privacy), np.arange(3.0) + 10 * scale)
    figure = chart.chart(runs, "epsilon", facet="env", log="x")
    assert [axes.get_title("left") for axes in figure.axes] == ["env = riverswim", "env = bandit"]
    figure.draw_without_rendering()
    ticks = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    assert {"0.5", "1"} <= set(ticks), "plain numbers"
    assert not any(tick.get_text() for tick in figure.axes[0].get_xticklabels(minor=True))
    facets = chart.chart([run for run in runs if run.cell.setting.epsilon], "learner.scale", facet="epsilon")
    assert [axes.get_title("left") for axes in facets.axes] == ["epsilon = 0.5", "epsilon = 1"]
    lines = axis(figure)
    assert lines["shuffle, scale = 0.1"] == lines["shuffle, scale = 0.2"] == [0.5, 1.0]
    assert lines["no privacy, scale = 0.1"] == [0, 1], "level, over the whole width"
    by_scale = axis(chart.chart(runs, "learner.scale", facet="env"))
    assert by_scale == {"no privacy": [0.1, 0.2], "shuffle, ε = 0.5": [0.1, 0.2], "shuffle, ε = 1": [0.1, 0.2]}
    sized = [replace(run, batches=int(100 * run.cell.setting.learner_parameters["scale"])) for run in runs]
    assert axis(chart.chart(sized, "batches", facet="env", kind="sd"))["no privacy"] == [10, 20]
    with pytest.raises(InvalidInputError, match="log is 'z'; expected x, y or xy"):
        chart.chart(runs, "epsilon", log="z")
    with pytest.raises(UnknownNameError, match=r"No setting of these results says its 'learner\.share'"):
        chart.chart(runs, "learner.share")


def test_many_settings_are_compared_at_once() -> None:
    """48 settings, 1,128 pairs: what took a test each takes a product of matrices."""
    rng = np.random.default_rng(0)
    runs = [result for k in range(48) for result in made(setting(0.01 * k), rng.normal(100 + k, 5, 20))]
    (group,) = compare.compare(runs)
    assert len(group.rows) == 48
    assert [row.adjusted is None for row in group.rows] == [True] + 47 * [False]
