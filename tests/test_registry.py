"""Names of ours, of installed packages and of users' own; the last two in every place that takes a name."""

from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from shufflerl import envs, learners, privatizers, registry
from shufflerl.errors import InvalidInputError, StateMismatchError, UnknownNameError
from shufflerl.experiments import engine, store
from shufflerl.experiments.cells import Cell
from shufflerl.experiments.setting import Setting, run
from shufflerl.experiments.sweep import read
from shufflerl.network import config
from tests.support.commands import call
from tests.support.guess import Guess
from tests.support.own import Doors, doors, quiet

GUESS, DOORS, QUIET = "tests.support.guess:Guess", "tests.support.own:doors", "tests.support.own:quiet"
OWN = Setting(doors, Guess, quiet, 100, epsilon=1.0, delta=1e-5, learner_parameters={"batches": 2})

SWEEP = f"""
episodes = [50, 100]
seeds = 2
budgets = {{ epsilon = 1.0 }}
environments = [{{ name = "{DOORS}", parameters = {{ pay = [0.8, 1] }} }}]
learners = ["{GUESS}", "ucbvi"]
privatizers = ["{QUIET}"]
"""

#: A learner in a file of the current folder.
FILE = """
from tests.support.guess import Guess

class Mine(Guess):
    '''Guesses as well.'''

    name = "mine"
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a learner, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path


def test_what_is_given_itself_is_known_by_where_it_is_found() -> None:
    assert (OWN.env, OWN.learner, OWN.privatizer) == (DOORS, GUESS, QUIET)
    assert Setting(DOORS, GUESS, QUIET, 100, 1.0, 1e-5, learner_parameters={"batches": 2}) == OWN
    found = run(OWN, 0)
    assert found.history.users.tolist() == [50, 50]
    assert found.certificate is not None
    assert found.certificate.model == "central"


def test_what_no_other_process_would_find_is_refused() -> None:
    class Local(Guess):
        pass

    with pytest.raises(InvalidInputError, match=r"learner .*Local cannot be found as .*at the top of a module"):
        Setting("riverswim", Local, "none", 10)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:Mine", r"Cannot import 'nowhere:Mine' \(No module named 'nowhere'\)"),
        ("tests.support.guess:Gues", "Cannot import .*no attribute 'Gues'"),
        (":Mine", "Cannot import ':Mine'"),
        ("json:__name__", "json:__name__ is 'json'; expected a class or function"),
    ],
)
def test_a_name_that_leads_to_no_learner_is_refused(name: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        learners.make(name, envs.make("riverswim").problem(10), 0)


def test_an_environment_must_be_one() -> None:
    with pytest.raises(InvalidInputError, match="expected it to make a MDP or GymSimulator"):
        run(Setting(Doors, "ucbvi", "none", 10), 0)  # type: ignore[arg-type]


def test_parameters_without_annotations_are_read_as_they_look() -> None:
    for text, value in (("1", 1), ("0.5", 0.5), ("true", True), ("none", None), ("far", "far")):
        assert envs.ENVIRONMENTS.parse(DOORS, [f"pay={text}"]) == {"pay": value}
        assert envs.ENVIRONMENTS.check(DOORS, "pay", value) == value
    with pytest.raises(UnknownNameError, match=r"has no parameter 'pays'\. Did you mean 'pay'"):
        envs.ENVIRONMENTS.parse(DOORS, ["pays=1"])


def test_packages_announce_their_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def announced(group: str) -> tuple[EntryPoint, ...]:
        assert group == "shufflerl.learners"
        return (EntryPoint("guess", GUESS, group), EntryPoint("ucbvi", GUESS, group))

    monkeypatch.setattr(registry, "entry_points", announced)
    monkeypatch.delitem(learners.LEARNERS.__dict__, "_entries", raising=False)
    try:
        assert learners.LEARNERS.summary("guess") == "Deploys random policies. It learns nothing, and says so."
        assert run(Setting("riverswim", "guess", "none", 10), 0).history.users.sum() == 10
        assert not Setting("riverswim", "ucbvi", "none", 10).own, "ours keep their names"
        assert [own.location for own in Setting("riverswim", "guess", "none", 10).own] == [GUESS]
        _, text, _ = call(capsys, monkeypatch, "learners")
        assert "guess " in text
        assert "batches=5" in text
    finally:
        del learners.LEARNERS.__dict__["_entries"]


@pytest.mark.parametrize(
    ("command", "known"),
    [("envs", envs.ENVIRONMENTS), ("learners", learners.LEARNERS), ("privatizers", privatizers.PRIVATIZERS)],
)
def test_lists_tell_names_parameters_and_a_sentence_in_80_columns(
    command: str, known: registry.Registry, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text, _ = call(capsys, monkeypatch, command)
    assert code == 0
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    rows = json.loads(call(capsys, monkeypatch, command, "--json")[1])
    assert set(rows) == {name for name, _ in known}
    words = " ".join(text.split())
    for name, row in rows.items():
        assert row["summary"]
        assert f"{name} {row['summary']}" in words
        assert all(f"{key}={value}" in words for key, value in row["parameters"].items())


def test_run_takes_a_learner_of_the_current_folder(
    mine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(mine))])
    arguments = ("--learner", "mine:Mine", "--learner-param", "batches=1e0", "--episodes", "1e2", "--json")
    code, text, _ = call(capsys, monkeypatch, "run", DOORS, *arguments)
    assert code == 0
    assert json.loads(text)["learner_parameters"] == {"batches": 1}


def test_a_coordinator_takes_them_too() -> None:
    told = config.CoordinatorConfig(episodes=1000, epsilon=1.0, learner=GUESS, environment=DOORS).run
    assert isinstance(told.make_learner(), Guess)
    node = config.NodeConfig(epsilon=1.0, environment=DOORS, environment_parameters={"pay": 0.5})
    node.check_environment()


def test_a_sweep_takes_them_and_remembers_their_source(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine / "sweep.toml").write_text(SWEEP)
    code, text, _ = call(capsys, monkeypatch, "sweep", "sweep.toml", "--workers", "1")
    assert (code, text) == (0, "16 cells in out/sweep: 0 were there, 16 were run.\n")
    code, text, _ = call(capsys, monkeypatch, "compare", "out/sweep")
    assert code == 0
    assert "Guess" in text
    cell = Cell(Setting("riverswim", "mine:Mine", "none", 10), 0)
    engine.run_cells([*read("sweep.toml"), cell], "out/sweep", workers=1)
    assert len(store.results(Path("out/sweep"))) == 17
    (mine / "mine.py").write_text(FILE + "# changed\n")
    monkeypatch.delitem(sys.modules, "mine")
    with pytest.raises(StateMismatchError, match=r"another version \(mine:Mine [0-9a-f]* there"):
        engine.run_cells([cell], "out/sweep", workers=1)
    engine.run_cells(read("sweep.toml"), "out/sweep", workers=1)


@pytest.mark.slow(3)
def test_workers_find_what_is_in_the_current_folder(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a sweep in another folder, which still wait for work, would not."""
    elsewhere = [Cell(Setting("riverswim", "sdp-pe", "none", 10), seed) for seed in (0, 1)]
    (mine / "elsewhere").mkdir()
    with monkeypatch.context() as there:
        there.chdir(mine / "elsewhere")
        engine.run_cells(elsewhere, "out", workers=2)
    cells = [Cell(Setting("riverswim", "mine:Mine", "none", 10), seed) for seed in (0, 1)]
    engine.run_cells(cells, mine / "out", workers=2)
    assert [result.cell for result in store.results(mine / "out")] == cells


def test_what_a_script_defines_itself_is_run_in_its_own_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = sys.modules["__main__"]
    mine = type("Notebook", (Guess,), {"__module__": "__main__", "__qualname__": "Notebook"})
    monkeypatch.setattr(main, "Notebook", mine, raising=False)
    cells = [Cell(Setting("riverswim", mine, "none", 10), seed) for seed in (0, 1)]
    assert cells[0].setting.learner == "__main__:Notebook"
    engine.run_cells(cells, tmp_path / "out", workers=2)
    assert len(store.results(tmp_path / "out")) == 2
