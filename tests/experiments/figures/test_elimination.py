from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from shufflerl.experiments.figures import elimination

# Before any elimination, between that of no privacy and that at epsilon 1, and when only optima are left of both.
EPISODES = (10**6, 10**11, 10**16)


@pytest.fixture(scope="module")
def rows() -> list[elimination.Row]:
    return elimination.sweep(EPISODES, seeds=(1,))


def test_the_sweep_covers_twelve_decades_in_halves() -> None:
    assert elimination.EPISODES[0] == 10**5
    assert elimination.EPISODES[-1] == 10**17
    steps = [math.log10(b / a) for a, b in zip(elimination.EPISODES, elimination.EPISODES[1:], strict=False)]
    assert steps == pytest.approx([0.5] * 24, abs=1e-5)


@pytest.mark.slow
def test_the_theorem_shows_in_its_table(rows: list[elimination.Row]) -> None:
    assert [(row.epsilon, row.episodes) for row in rows] == [(e, k) for e in elimination.EPSILONS for k in EPISODES]
    assert all(row.optimum_kept for row in rows)
    free, private = rows[:3], rows[3:]
    assert [row.log2_policies == 24 for row in free] == [True, False, False]
    assert [row.log2_policies == 24 for row in private] == [True, True, False]
    assert free[2].log2_policies == private[2].log2_policies == elimination.ONLY_OPTIMA
    for row in rows:
        assert (row.first_elimination is None) == (row.log2_policies == 24)
        assert row.switches <= 8 * math.log2(row.episodes)
    assert free[2].first_elimination is not None
    assert private[2].first_elimination is not None
    assert free[2].first_elimination < 1e11 < private[2].first_elimination < 1e16
    assert free[2].regret < 10 * free[1].regret
    assert private[1].regret > 0.3 * EPISODES[1]  # of at most 0.476 an episode
    assert 100 < private[2].regret / free[2].regret < 500
    assert {row.precision for row in free} == {1.0}
    assert 300 < private[0].precision < private[2].precision < 600


@pytest.mark.slow
def test_the_product_set_keeps_no_fewer(rows: list[elimination.Row]) -> None:
    product = elimination.sweep(EPISODES[1:], (None,), (1,), policies="product")
    assert all(mine.log2_policies >= its.log2_policies for mine, its in zip(product, rows[1:3], strict=True))
    assert all(row.optimum_kept for row in product)


@pytest.mark.slow
def test_the_command_prints_the_table_and_writes_the_figure_whole(
    rows: list[elimination.Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "elimination.svg"
    monkeypatch.setattr(elimination, "sweep", lambda **_: rows)
    monkeypatch.setattr(sys, "argv", ["elimination", str(out)])
    monkeypatch.setenv("COLUMNS", "120")
    elimination.main()
    text = capsys.readouterr().out
    assert "first gone" in text
    assert text.count("no privacy") == 2 * len(EPISODES)  # the sweep, and what stands for the priced budgets
    assert "<svg" in out.read_text()
    assert [path.name for path in out.parent.iterdir()] == ["elimination.svg"]


def test_a_figure_that_fails_leaves_the_old_one_alone(
    rows: list[elimination.Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    def fails(self: Figure, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    out = tmp_path / "elimination.png"
    out.write_bytes(b"the old one")
    monkeypatch.setattr(elimination, "sweep", lambda **_: rows)
    monkeypatch.setattr(sys, "argv", ["elimination", str(out)])
    monkeypatch.setattr(Figure, "savefig", fails)
    with pytest.raises(KeyboardInterrupt):
        elimination.main()
    assert out.read_bytes() == b"the old one"


def test_a_figure_of_one_budget_that_never_eliminates_can_be_drawn() -> None:
    figure = elimination.draw(elimination.sweep((10**5, 10**6), (None,), (1,), policies="product"), [])
    figure.canvas.draw()


def test_a_name_that_is_no_figures_is_refused_before_the_sweep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["elimination", "elimination.doc"])
    with pytest.raises(SystemExit):
        elimination.main()
    assert "use a name ending in .png, .svg or .pdf" in capsys.readouterr().err
