from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from shufflerl.errors import InvalidInputError, LostWorkersError, MissingExtraError
from shufflerl.experiments import engine, store
from shufflerl.experiments.cells import Cell, curve_episodes, run_cell
from shufflerl.experiments.setting import Setting, run
from shufflerl.experiments.sweep import read
from tests.support import commands
from tests.support.waiting import PATIENCE, until

EXAMPLE = Path(__file__).parents[2] / "examples" / "sweep.toml"

SMALL = """
episodes = 300
seeds = 6
environments = ["riverswim", "bandit"]
privatizers = ["none"]
[[learners]]
name = "ucbvi"
parameters = { scale = [0.05, 0.5] }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def edited(path: Path, old: str, new: str) -> Path:
    assert old in SMALL
    path.write_text(SMALL.replace(old, new))
    return path


def test_the_example_holds_all_combinations_it_lists() -> None:
    cells = read(EXAMPLE)
    settings = {cell.key: cell.setting for cell in cells}
    # Per environment: sdp-pe with none and shuffle at two budgets, ucbvi at two scales with none and central at two.
    assert len(settings) == len(cells) == 2 * (1 + 2 + 2 * (1 + 2)) * 16
    assert {cell.seed for cell in cells} == set(range(16))
    assert {(s.learner, s.privatizer) for s in settings.values()} == {
        ("sdp-pe", "none"),
        ("sdp-pe", "shuffle"),
        ("ucbvi", "none"),
        ("ucbvi", "central"),
    }
    assert {s.epsilon for s in settings.values() if s.privatizer == "none"} == {None}
    assert {s.epsilon for s in settings.values() if s.privatizer != "none"} == {1.0, 5.0}


def test_a_cell_gives_what_a_run_gives() -> None:
    cell = Cell(Setting("riverswim", "ucbvi", "shuffle", 300, 1.0, 1e-5, learner_parameters={"batch": 50}), 3)
    result, direct = run_cell(cell), run(cell.setting, cell.seed)
    assert result.regret == direct.history.total_regret
    assert result.switches == direct.history.switches
    assert result.optimal_value == direct.optimal_value
    assert result.reward == pytest.approx(direct.history.reward.sum() / 300)
    assert result.curve is not None
    assert len(result.curve) == len(curve_episodes(300)) == 201
    assert result.curve[0] == 0
    assert result.curve[-1] == pytest.approx(result.regret)
    assert result.certificate is not None
    assert result.certificate["epsilon"] <= 1
    assert run_cell(cell) == result


def test_a_key_tells_cells_apart_and_is_the_same_tomorrow() -> None:
    cell = Cell(Setting("riverswim", "ucbvi", "none", 300), 3)
    assert cell.key == "eda43aa27b7a5019d7307736cfdca5e68543b8c8c3640fa580482874be9511b6"
    assert len({cell.key, Cell(cell.setting, 4).key, Cell(Setting("riverswim", "ucbvi", "none", 301), 3).key}) == 3


@pytest.mark.parametrize("episodes", [1, 7, 200, 201, 10**17])
def test_the_grid_of_a_curve_runs_from_nothing_to_all(episodes: int) -> None:
    grid = curve_episodes(episodes)
    assert (grid[0], grid[-1], len(grid)) == (0, episodes, min(episodes, 200) + 1)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("episodes = 300", "episode = 300", "episode: There is no key 'episode' here. Did you mean 'episodes'?"),
        ("episodes = 300", "", "episodes: is missing"),
        ("episodes = 300", "episodes = 0", "episodes: it is 0; expected a whole number"),
        ("episodes = 300", "episodes = [300, true]", "episodes[1]: it is True"),
        ("episodes = 300", "episodes = []", "episodes: is empty"),
        ("episodes = 300", "episodes = 300 300", "is not valid TOML: Expected newline or end of document after a "),
        ("seeds = 6", "seeds = '6'", "seeds: it is '6'"),
        ("seeds = 6", "seeds = [1, -1]", "seeds[1]: it is -1"),
        ("seeds = 6", "seeds = [1, 1]", "seed 1' occurs twice"),
        ("seeds = 6", "seeds = [1]\nfirst_seed = 1", "first_seed: goes with a number"),
        ("seeds = 6", "seeds = 400_000", "1,600,000 cells"),
        ('"bandit"', '"bandits"', "environments[1].name: There is no environment 'bandits'. Did you mean 'bandit'?"),
        ('"bandit"', "7", "environments[1]: is 7; expected a table"),
        ('"bandit"', "{ nam = 'bandit' }", "environments[1].nam: There is no key 'nam' here. Did you mean 'name'?"),
        ('"bandit"', "{ parameters = {} }", "environments[1].name: is missing; say which environment"),
        ('"bandit"', "{ name = 'bandit', parameters = 3 }", "environments[1].parameters: is 3; expected a table"),
        ('"bandit"', "{ name = 'gymnasium', parameters = {horizon = 3} }", "parameters.id: is missing"),
        ('["riverswim", "bandit"]', '"riverswim"', "environments: is 'riverswim'; expected a list of names"),
        ('"ucbvi"', '"ucbv"', "learners[0].name: There is no learner 'ucbv'. Did you mean 'ucbvi'?"),
        ("scale = [0.05", "scal = [0.05", "learners[0].parameters.scal: learner 'ucbvi' has no parameter 'scal'."),
        ("scale = [0.05", "scale = ['x'", "learners[0].parameters.scale[0]: parameter 'scale' of learner 'ucbvi' is"),
        ("scale = [0.05", "scale = [true", "parameters.scale[0]: parameter 'scale' of learner 'ucbvi' is True"),
        ("scale = [0.05", "batch = 1.5, scale = [0.05", "parameters.batch: parameter 'batch' of learner 'ucbvi' is"),
        ("scale = [0.05", "scale = [-1", "environments[0], learners[0], privatizers[0]: scale is -1.0; expected"),
        ('["none"]', '["none", "shufle"]', "privatizers[1].name: There is no privatizer 'shufle'. Did you mean"),
        ('["none"]', '["none", "shuffle"]', "budgets: is missing"),
        ('["none"]', '["none"]\nbudgets = { epsilon = 1 }', "budgets: no privatizer here takes a budget"),
        ('["none"]', '["shuffle"]\nbudgets = { delta = 1e-5 }', "budgets.epsilon: is missing"),
        ('["none"]', '["shuffle"]\nbudgets = { epsilon = [1, 0] }', "budgets.epsilon[1]: it is 0"),
        ('["none"]', '["shuffle"]\nbudgets = { epsilon = 1, delta = 2 }', "budgets.delta: it is 2"),
        ('["none"]', '["shuffle"]\nbudgets = { eps = 1 }', "budgets.eps: There is no key 'eps' here. Did you mean"),
        ('name = "ucbvi"', 'name = "ucbvi"\nprivatizers = ["local"]', "privatizers: 'local' is not in privatizers"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_its_place(file: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        read(edited(file, old, new))
    assert str(refused.value).startswith(str(file))
    assert said in str(refused.value)


def test_a_privatizer_that_nobody_uses_is_refused(file: Path) -> None:
    file.write_text(
        SMALL.replace('["none"]', '["none", "shuffle"]\nbudgets = {epsilon = 1}') + "privatizers = ['none']"
    )
    with pytest.raises(InvalidInputError, match=r"privatizers\[1\]: no learner goes with 'shuffle'"):
        read(file)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="No such file"):
        read(tmp_path / "none.toml")
    with pytest.raises(InvalidInputError, match="Is a directory"):
        read(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"episodes = '\xe9'")
    with pytest.raises(InvalidInputError, match="UTF-8"):
        read(tmp_path / "latin.toml")


def test_whole_numbers_may_be_written_with_an_exponent(file: Path) -> None:
    assert {cell.setting.episodes for cell in read(edited(file, "300", "[1e3, 2000]"))} == {1000, 2000}
    cells = read(edited(file, "scale = [0.05, 0.5]", "scale = 1, batch = 1e1"))
    assert cells[0].setting.learner_parameters == {"scale": 1.0, "batch": 10}


@pytest.mark.slow
def test_one_and_two_workers_give_identical_results(file: Path, tmp_path: Path) -> None:
    cells = read(file)
    for workers in (1, 2):
        end = engine.run_cells(cells, tmp_path / str(workers), workers=workers)
        assert (end.cells, end.resumed, end.done) == (24, 0, 24)
    one, two = store.results(tmp_path / "1"), store.results(tmp_path / "2")
    assert one == two == [run_cell(cell) for cell in cells]
    tables = [store.load(tmp_path / name).drop_columns(["seconds"]) for name in ("1", "2")]
    assert tables[0].equals(tables[1])


# A sweep of which every start of a cell leaves a line behind. The function is sent to the workers by value.
COUNTED = """
import os, sys, time
from shufflerl.experiments import engine
from shufflerl.experiments.cells import run_cell
from shufflerl.experiments.sweep import read

def counted(cell, path=sys.argv[3], sweep=os.getpid(), run_cell=run_cell):
    marks = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(marks, f"{cell.key} {sweep} {os.getpid()}\\n".encode())
    os.close(marks)
    time.sleep(0.05)  # so that kills fall within cells and not only between them
    return run_cell(cell)

engine.run_cell = counted
print(engine.run_cells(read(sys.argv[1]), sys.argv[2], workers=int(sys.argv[4])).resumed)
"""


def finished(folder: Path) -> set[str]:
    return {path.stem for path in (folder / "cells").glob("[!.]*.parquet")}


@pytest.mark.slow
def test_killed_three_times_it_ends_as_if_undisturbed_and_redoes_nothing(file: Path, tmp_path: Path) -> None:
    """Begun anew by as many workers and by others: more kills would fall in the same places."""
    out, marks = tmp_path / "out", tmp_path / "marks"
    marks.touch()
    command = [sys.executable, "-c", COUNTED, str(file), str(out), str(marks)]

    def started(sweep: int) -> Counter[str]:
        lines = [line.split() for line in marks.read_text().splitlines()]
        return Counter(key for key, of, _ in lines if int(of) == sweep)

    rng = random.Random(5)
    before: set[str] = set()
    for workers in (1, 2, 2):
        process = subprocess.Popen([*command, str(workers)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        # At a random moment: so many cells later, and some way into the next.
        target = len(before) + rng.randint(0, 3)
        deadline = time.monotonic() + PATIENCE
        while (len(finished(out)) < target or not started(process.pid)) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.08))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not before & set(started(process.pid)), "cells that were done were run again"
        assert before <= finished(out)
        before = finished(out)
    assert 0 < len(before) < 24
    last = subprocess.Popen([*command, "2"], stdout=subprocess.PIPE, text=True)
    assert int(last.communicate(timeout=PATIENCE)[0]) == len(before)
    assert started(last.pid) == Counter({cell.key for cell in read(file)} - before)
    assert store.results(out) == [run_cell(cell) for cell in read(file)]
    assert not list((out / "cells").glob(".*"))
    # The workers of a sweep that was killed end by themselves.
    workers_ever = {int(line.split()[2]) for line in marks.read_text().splitlines()}
    until(lambda: not any(_runs(pid) for pid in workers_ever))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fallen = tmp_path / "fallen"

    def dies_once(cell: Cell) -> object:
        import os

        from shufflerl.experiments.cells import run_cell

        if cell.seed == 2 and not fallen.exists():
            fallen.touch()
            os.kill(os.getpid(), 9)
        return run_cell(cell)

    cells = read(file)
    monkeypatch.setattr(engine, "run_cell", dies_once)
    engine.run_cells(cells, tmp_path / "out", workers=2)
    assert fallen.exists()
    assert store.results(tmp_path / "out") == [run_cell(cell) for cell in cells]


@pytest.mark.slow
def test_workers_that_always_die_end_the_sweep(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(_: Cell) -> None:
        import os

        os.kill(os.getpid(), 9)

    monkeypatch.setattr(engine, "run_cell", dies)
    with pytest.raises(LostWorkersError, match="use fewer workers"):
        engine.run_cells(read(file), tmp_path / "out", workers=2)


def test_a_cell_that_fails_is_named_and_the_others_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [Cell(Setting("riverswim", "ucbvi", "none", 50), seed) for seed in range(3)]

    def fails(cell: Cell) -> object:
        if cell.seed == 1:
            return run_cell(Cell(Setting("riverswim", "ucbvi", "none", 50, epsilon=1.0), 1))
        return run_cell(cell)

    monkeypatch.setattr(engine, "run_cell", fails)
    with pytest.raises(InvalidInputError, match=r"^ucbvi with none .* on riverswim, 50 episodes, seed 1: "):
        engine.run_cells(cells, tmp_path, workers=1)
    assert finished(tmp_path) == {cells[0].key}


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    cell = Cell(Setting("riverswim", "ucbvi", "none", 50), 0)
    with pytest.raises(InvalidInputError, match="workers is 0"):
        engine.run_cells([cell], tmp_path, workers=0)
    with pytest.raises(InvalidInputError, match="backend is 'dask'; expected one of: loky, ray"):
        engine.run_cells([cell], tmp_path, backend="dask")
    with pytest.raises(InvalidInputError, match="no cells"):
        engine.run_cells([], tmp_path)
    with pytest.raises(InvalidInputError, match="twice"):
        engine.run_cells([cell, cell], tmp_path)


def test_without_ray_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"shufflerl\[ray\]"):
        engine.run_cells([Cell(Setting("riverswim", "ucbvi", "none", 50), 0)], tmp_path / "out", backend="ray")
    assert not (tmp_path / "out").exists()


# Two machines, of which one is killed while it runs a cell, which it does until then; starts of cells are counted.
CLUSTER = """
import os, sys, time
import ray
from ray.cluster_utils import Cluster
from shufflerl.experiments import engine
from shufflerl.experiments.sweep import read

machine = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={**machine, "include_dashboard": False})
other = cluster.add_node(**machine)
ray.init(address=cluster.address, log_to_driver=False)
run_here = engine.run_here

def starts(path=sys.argv[3]):
    with open(path) as marks:
        return [line.split() for line in marks]

def counted(cell, expected, path=sys.argv[3], doomed=other.node_id, run_here=run_here):
    node = ray.get_runtime_context().get_node_id()
    marks = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(marks, f"{cell.key} {node}\\n".encode())
    os.close(marks)
    time.sleep(600 if node == doomed else 0.2)
    return run_here(cell, expected)

engine.run_here = counted
killed = False

def show(now):
    global killed
    if now.done and not killed and any(node == other.node_id for _, node in starts()):
        killed = True
        cluster.remove_node(other, allow_graceful=False)

end = engine.run_cells(read(sys.argv[1]), sys.argv[2], backend="ray", progress=show)
ray.shutdown()
cluster.shutdown()
print("cells", end.done, "machines", len({node for _, node in starts()}), "killed", killed)
"""


def test_on_a_ray_cluster_with_a_machine_killed_the_results_are_identical(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    marks = tmp_path / "marks"
    command = [sys.executable, "-c", CLUSTER, str(file), str(tmp_path / "out"), str(marks)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.stdout.splitlines()[-1:] == ["cells 24 machines 2 killed True"], ended.stderr
    assert store.results(tmp_path / "out") == [run_cell(cell) for cell in read(file)]
    times = Counter(line.split()[0] for line in marks.read_text().splitlines())
    assert sorted(times.values()) == [1] * 23 + [2], "what the lost machine was running is run once more"


@pytest.mark.slow
def test_the_command_runs_resumes_and_reports(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = partial(commands.call, capsys, monkeypatch)
    monkeypatch.chdir(tmp_path)
    sweep = ("sweep", str(file), "--workers", "1")
    assert call(*sweep) == (0, "24 cells in out/small: 0 were there, 24 were run.\n", "")
    cells = sorted((tmp_path / "out" / "small" / "cells").iterdir())
    cells[0].write_bytes(cells[0].read_bytes()[:-9])
    cells[1].unlink()
    code, out, err = call(*sweep)
    assert (code, out) == (0, "24 cells in out/small: 22 were there, 2 were run.\n")
    assert "Resuming out/small: 22 of 24 cells are done already." in err
    assert f"Damaged, will be recomputed: out/small/cells/{cells[0].name}" in err
    manifest = json.loads((tmp_path / "out" / "small" / "manifest.json").read_text())
    assert manifest["sweep"][0]["seeds"] == list(range(6))
    edited(file, "seeds = 6", "seeds = 7")
    code, out, _ = call(*sweep)
    assert (code, out) == (0, "28 cells in out/small: 24 were there, 4 were run.\n")
    edited(file, "seeds = 6", "seeds = [9]")
    code, out, _ = call(*sweep)
    assert (code, out) == (0, "4 cells in out/small: 0 were there, 4 were run. 28 others are there too.\n")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "run_cells", interrupted)
    code, _, err = call(*sweep)
    assert (code, err) == (130, "Stopped; what is done is in out/small, and the same command goes on from there.\n")
