from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from shufflerl.errors import InvalidInputError
from shufflerl.experiments import setting as settings
from shufflerl.experiments.curves import check_plot, regret_curve
from shufflerl.experiments.setting import Setting, run, run_seeds, summary

SETTING = Setting("riverswim", "ucbvi", "none", 300)


def test_the_spread_over_seeds_is_the_sample_standard_deviation() -> None:
    runs = list(run_seeds(SETTING, range(4)))
    figures = summary(SETTING, runs)
    losses = [one.history.total_regret for one in runs]
    assert figures["regret"]["sd"] == pytest.approx(statistics.stdev(losses))
    assert figures["regret"]["mean"] == pytest.approx(statistics.mean(losses))
    assert figures["regret"]["per_seed"] == losses


def test_a_reward_nobody_counted_is_null() -> None:
    one = run(SETTING, 0)
    unknown = dataclasses.replace(one.history, reward=np.full(len(one.history), np.nan))
    figures = summary(SETTING, [dataclasses.replace(one, history=unknown)])
    assert figures["reward_per_episode"] is None
    json.dumps(figures, allow_nan=False)


def test_figures_are_in_the_environments_own_units_too() -> None:
    parameters = {"id": "Blackjack-v1", "horizon": 3, "reward_low": -1.0, "reward_high": 1.0}
    setting = Setting("gymnasium", "ucbvi", "none", 20, env_parameters=parameters, learner_parameters={"batch": 20})
    figures = summary(setting, [run(setting, 0)])
    own = figures["own_units"]
    assert own["reward_per_episode"] == pytest.approx(2 * figures["reward_per_episode"] - 3)
    assert -1 <= own["reward_per_episode"] <= 1, "one hand, won or lost"
    assert own["regret"] == {"mean": None, "sd": None}
    assert summary(SETTING, [run(SETTING, 0)])["own_units"] is None


def test_how_long_a_large_problem_will_take_is_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.expected_seconds(SETTING, 0) is None
    monkeypatch.setattr(settings, "LARGE", 1)
    batches = dataclasses.replace(SETTING, learner_parameters={"batch": 100})
    seconds = settings.expected_seconds(batches, 0)
    assert seconds is not None
    assert 0 < seconds < 60


def test_seconds_do_not_include_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def slow_compiler() -> Iterator[Callable[[], float]]:
        yield lambda: 1e6

    monkeypatch.setattr(settings, "compiler_clock", slow_compiler)
    assert run(SETTING, 0).seconds < -9e5


def test_too_many_episodes_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"episodes is about 2\^1329; expected .* at most 10{18}\b"):
        Setting("riverswim", "ucbvi", "none", 10**400)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("regret", "Use a name ending in .png, .svg, .pdf"),
        ("regret.docx", "Use a name ending in .png, .svg, .pdf"),
        ("file/regret.png", "no file can be made there"),
        ("folder.png", "no file can be made there"),
    ],
)
def test_a_figure_that_cannot_be_written_is_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(InvalidInputError, match=message):
        check_plot(SETTING, 0, tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder.png"}
    check_plot(SETTING, 0, tmp_path / "new" / "deep" / "regret.SVG")
    assert not (tmp_path / "new").exists()


def test_a_figure_without_regret_is_refused(tmp_path: Path) -> None:
    parameters = {"id": "Blackjack-v1", "horizon": 3, "reward_low": -1.0, "reward_high": 1.0}
    with pytest.raises(InvalidInputError, match="no regret to plot"):
        check_plot(Setting("gymnasium", "ucbvi", "none", 10, env_parameters=parameters), 0, tmp_path / "regret.png")


def test_a_full_disk_leaves_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, path: Path, **_: object) -> None:
        path.write_text("half a figure")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(InvalidInputError, match=r"regret\.png: No space left on device"):
        regret_curve(SETTING, [run(SETTING, 0)], tmp_path / "regret.png")
    assert not list(tmp_path.iterdir())


def test_the_figure_says_what_it_shows(tmp_path: Path) -> None:
    setting = Setting(
        "riverswim",
        "ucbvi",
        "shuffle",
        200,
        epsilon=1.0,
        delta=1e-6,
        env_parameters={"n_states": 3},
        learner_parameters={"batch": 50},
    )
    for seeds, label in ((1, "seed 0"), (2, "mean of 2 seeds")):
        figure = tmp_path / f"{seeds}.svg"
        with mpl.rc_context({"svg.fonttype": "none"}):
            regret_curve(setting, list(run_seeds(setting, range(seeds))), figure)
        text = figure.read_text()
        assert f">{label}<" in text
        assert "ucbvi (batch=50) on riverswim (n_states=3)" in text
        assert "shuffle (epsilon=1.0, delta=1e-06)" in text


def test_small_regrets_have_labels_that_differ(tmp_path: Path) -> None:
    setting = Setting("riverswim", "ucbvi", "none", 1)
    with mpl.rc_context({"svg.fonttype": "none"}):
        regret_curve(setting, [run(setting, 0)], tmp_path / "small.svg")
    assert ">0.2<" in (tmp_path / "small.svg").read_text()
