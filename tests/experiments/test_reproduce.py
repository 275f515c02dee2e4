from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import image

from shufflerl import cli
from shufflerl.arrays import FloatArray
from shufflerl.errors import LostWorkersError, StateMismatchError, StorageError
from shufflerl.experiments import report, store, tuning
from shufflerl.experiments.claims import OURS, SHORT, Verdict
from shufflerl.experiments.figures import (
    FIGURES,
    bandit,
    base,
    regret_curves,
    scaling,
    spectrum,
    style,
    suite,
    switches,
    theorem,
)
from shufflerl.experiments.figures.base import FIRST_TUNING_SEED, FULL, QUICK, Figure, Runs
from shufflerl.experiments.figures.lines import LINES, OPTIMISTIC, OPTIMISTIC_FREE, UCBVI_RARELY
from shufflerl.experiments.figures.scaling import VALUES, Point
from shufflerl.experiments.measuring import measure
from shufflerl.experiments.reproduce import RUNS, TIMINGS, TUNING, in_order, reproduce
from shufflerl.experiments.setting import Setting
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.slow(2)

ROOT = Path(__file__).parents[2]
TINY = replace(QUICK, episodes=200, seeds=2, tuning_seeds=1, candidates=2)
#: Figures that share cells, one that is tuned elsewhere, and one that measures the machine.
SOME: tuple[Figure, ...] = (regret_curves.FIGURE, switches.FIGURE, bandit.FIGURE, scaling.FIGURE)
FEW_POINTS = {"X": (4, 8), "A": (2,), "H": (6,)}

#: The same, for a process that may be killed.
SCRIPT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.experiments.test_reproduce import FEW_POINTS, SOME, TINY, VALUES
from shufflerl.experiments.reproduce import reproduce
VALUES["quick"] = FEW_POINTS
def run(**how):
    return reproduce(TINY, Path(sys.argv[1]), figures=SOME, **how)
"""


@pytest.fixture(autouse=True)
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VALUES, "quick", FEW_POINTS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VALUES, "quick", FEW_POINTS)
        reproduce(TINY, out, workers=1, figures=SOME)
    return out


def same(one: Path, other: Path) -> None:
    """All results equal, and all files made from them; times of runs and figures of times are apart."""
    for phase in (TUNING, RUNS):
        tables = [store.load(out / phase).drop_columns(["seconds"]) for out in (one, other)]
        assert tables[0].equals(tables[1])
    names = [path.name for path in (one / "figures").iterdir() if not path.name.startswith("scaling")]
    assert len(names) == 2 * len(SOME)  # with the picture of all in place of the one on scaling
    for name in ("summary.json", *(f"figures/{name}" for name in names)):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def result_files(out: Path) -> list[Path]:
    """Every stored result and measurement."""
    return [*out.glob("*/cells/[!.]*.parquet"), *out.glob(f"{TIMINGS}/[!.]*.json")]


def finished(out: Path) -> dict[str, tuple[int, int]]:
    """The same; a file that is written again is another one."""
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in result_files(out)}


def test_the_figures_are_those_of_the_issues_and_every_line_has_as_many_candidates_or_none() -> None:
    assert len({figure.name for figure in FIGURES}) == len(FIGURES) == 13
    ours = {OPTIMISTIC, OPTIMISTIC_FREE}
    assert {len(line.candidates) for line in LINES if line not in ours} == {FULL.candidates}
    assert all(line.candidates == ({},) for line in ours), "never more attention than its rivals get"
    assert (FULL.episodes, FULL.seeds) == (20_000, 20)
    assert max(FULL.reported) < FIRST_TUNING_SEED <= min(FULL.tuning)


def test_plans_become_batches_at_every_k() -> None:
    own = base.family(UCBVI_RARELY, "riverswim", 1.0, 20_000)
    assert own.setting({"scale": 0.02, "plans": 300}).learner_parameters == {"scale": 0.02, "batch": 67}
    assert own.setting({"scale": 0.02, "plans": 300}, 200).learner_parameters == {"scale": 0.02, "batch": 1}


def test_constants_are_chosen_on_tuning_seeds_by_their_mean_regret(undisturbed: Path) -> None:
    tuned = store.results(undisturbed / TUNING)
    assert {result.cell.seed for result in tuned} == set(TINY.tuning)
    runs = Runs(tuned)
    families = bandit.FIGURE.families(TINY)
    chosen = tuning.choose(families, TINY, runs)
    for own in families:
        tried = tuning.candidates(own, TINY)
        if len(tried) == 1:
            assert chosen[own] == tried[0], "nothing to try"
            continue
        mean = {str(c): runs.regrets(own.setting(c)).mean() for c in tried}
        assert mean[str(chosen[own])] == min(mean.values())
    assert len({str(chosen[own]) for own in families}) > 1
    reported = store.results(undisturbed / RUNS)
    assert {result.cell.seed for result in reported} == set(TINY.reported)
    used = {str(result.cell.setting.learner_parameters) for result in reported}
    assert {str(own.setting(chosen[own]).learner_parameters) for own in families} <= used


def test_cells_that_figures_share_are_run_once(undisturbed: Path) -> None:
    chosen = tuning.choose(
        [own for figure in SOME for own in figure.families(TINY)], TINY, Runs(store.results(undisturbed / TUNING))
    )
    asked = [cell.key for figure in SOME for cell in figure.cells(TINY, chosen)]
    stored = [result.cell.key for result in store.results(undisturbed / RUNS)]
    assert len(stored) == len(set(stored)) < len(asked)
    assert set(stored) == set(asked)


def test_every_kind_of_cell_is_begun_first_and_none_is_lost(undisturbed: Path) -> None:
    cells = [result.cell for result in store.results(undisturbed / RUNS)]
    ordered = in_order(cells[::-1])
    assert sorted(cell.key for cell in ordered) == sorted(cell.key for cell in cells)
    begun = [(cell.setting.learner, cell.setting.learner_parameters.get("constants")) for cell in ordered]
    assert len(set(begun[:4])) == len(set(begun)) == 4
    assert begun[4:] == sorted(begun[4:], key=lambda kind: kind[0] == "sdp-pe")


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, report.Reproduction]:
    out = tmp_path_factory.mktemp("everything")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VALUES, "quick", FEW_POINTS)
        patch.setitem(theorem.EPISODES, "quick", (10**3, 10**4))
        patch.setitem(spectrum.EPISODES, "quick", (10**3, spectrum.TUNED_AT))
        patch.setitem(suite.ENVIRONMENTS, "quick", ("RiverSwim 4/6", "bandit"))
        return out, reproduce(TINY, out, workers=1)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_every_figure_makes_its_files(everything: tuple[Path, report.Reproduction], figure: Figure) -> None:
    out, _ = everything
    png, svg = (out / "figures" / f"{figure.name}.{kind}" for kind in ("png", "svg"))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert f'<section id="{figure.name}">' in (out / "report.html").read_text()


def test_the_page_needs_nothing_else_and_says_every_claim(everything: tuple[Path, report.Reproduction]) -> None:
    out, end = everything
    page = end.page.read_text()
    assert page.count("<svg") == len(FIGURES) + 1
    assert page.index("<svg") < page.index('class="strip"') < page.index("<table"), "pictures, verdicts, then tables"
    names = re.findall(r'\bid="([^"]+)"', page)
    assert len(names) == len(set(names)), "figures on one page do not take each other's parts"
    for panel in (panel for figure in FIGURES for panel in figure.panels):
        assert f"{panel.title}</b></a> <i>The paper:</i> {panel.paper} <i>Here:</i> " in page
    for outside in ("http://", "https://", "<script", "<link", "url(h", "@import"):
        found = [line for line in page.splitlines() if outside in line and "xmlns" not in line]
        assert not found, (outside, found[:1])
    assert "{{" not in page
    summary = json.loads((out / "summary.json").read_text())
    assert len(summary["claims"]) == len(end.claims) >= 15
    for claim in end.claims:
        assert claim.why.count(".") >= 2, f"two sentences say why: {claim.why}"
        assert claim.outcome.numbers
        assert len(claim.short) <= SHORT, claim.short
        assert f"{claim.short}</summary>" in page.replace("&#x27;", "'")
    assert {own["line"] for own in summary["constants"]} == {line.name for line in LINES}
    for own in summary["constants"]:
        optimistic, rarely = "optimistic" in own["line"], own["line"] == UCBVI_RARELY.name
        assert (own["chosen"] == {}) is optimistic
        assert (own["theory"] is None) is (optimistic or rarely)
    ours = [claim.place == OURS for claim in end.claims]
    assert any(ours)
    assert ours == sorted(ours), "the paper's claims come first"
    assert "differential privacy in the shuffle model" in page


def test_the_papers_figures_are_shown_before_anything_else_is_run(undisturbed: Path, tmp_path: Path) -> None:
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    extra = Figure("extra", "Extra", lambda _: pytest.fail("shown too late"), cells=lambda *_: pytest.fail("run first"))

    class ShownError(Exception):
        pass

    def show(path: Path) -> None:
        assert path.read_bytes().startswith(b"\x89PNG")
        raise ShownError

    with pytest.raises(ShownError):
        reproduce(TINY, tmp_path, figures=(extra, *SOME), workers=1, show=show)


def test_verdicts_come_from_the_runs(undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same analysis, shown the regrets of another world, says the opposite."""
    runs = Runs(store.results(undisturbed / RUNS))
    families = [own for figure in SOME for own in figure.families(TINY)]
    chosen = tuning.choose(families, TINY, Runs(store.results(undisturbed / TUNING)))

    def verdict(**regrets: float) -> Verdict:
        def told(_: Runs, setting: Setting) -> FloatArray:
            return regrets.get(setting.privatizer, 50.0) * np.array([1.0, 1.01])

        monkeypatch.setattr(Runs, "regrets", told)
        analysis = bandit.FIGURE.analyse(base.Evidence(TINY, runs, chosen))
        return analysis.claims[0].outcome.verdict

    assert verdict(shuffle=10, local=80) is Verdict.HOLDS
    assert verdict(shuffle=80, local=10) is Verdict.NOT_HERE


def test_killed_three_times_it_ends_as_if_undisturbed_and_redoes_nothing(undisturbed: Path, tmp_path: Path) -> None:
    """While it tunes, runs and measures, and with one worker and two, which give the same.

    More kills would fall in the same places.
    """
    rng = random.Random(11)
    total = len(finished(undisturbed))
    before: dict[str, tuple[int, int]] = {}
    for kill in range(3):
        command = [sys.executable, "-c", f"{SCRIPT}\nrun(workers={1 + kill % 2})", str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        # At a random moment of each third of the work, measurements included.
        target = round(total * (kill + rng.random()) / 3.1)
        deadline = time.monotonic() + PATIENCE
        while len(result_files(tmp_path)) < target and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        now = finished(tmp_path)
        assert before.items() <= now.items(), "what was done was written again"
        assert len(now) < total
        before = now
    assert len(before) > total / 2
    reproduce(TINY, tmp_path, workers=2, figures=SOME)
    assert before.items() <= finished(tmp_path).items(), "what was done was written again"
    assert len(finished(tmp_path)) == total
    same(tmp_path, undisturbed)
    assert not list(tmp_path.rglob("*.partial"))


def test_what_was_measured_is_not_measured_again_unless_it_is_damaged(tmp_path: Path) -> None:
    points = [Point("UCBVI", 2, 2, 2), Point("UCBVI", 3, 2, 2)]
    told: list[tuple[int, int]] = []
    first = measure(points, tmp_path, lambda now: told.append((now.resumed, now.done)))
    assert all(timing.seconds > 0 and (timing.bytes is None or timing.bytes > 0) for timing in first)
    (tmp_path / f"{points[0].name}.json").write_text('{"seconds": ')
    again = measure(points, tmp_path, lambda now: told.append((now.resumed, now.done)))
    assert told == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)]
    assert again[1] == first[1]
    assert again[0].point == points[0]


def test_a_process_that_cannot_measure_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LostWorkersError, match=r"ended early.*run the same command again"):
        measure([Point("nobody", 2, 2, 2)], tmp_path, lambda _: None)
    capfd.readouterr()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_version_is_refused_and_left_alone(undisturbed: Path) -> None:
    before = {path: path.read_bytes() for path in undisturbed.rglob("*") if path.is_file()}
    manifest = undisturbed / RUNS / "manifest.json"
    text = manifest.read_text()
    try:
        manifest.write_text(text.replace('"shufflerl": "', '"shufflerl": "0.0.'))
        with pytest.raises(StateMismatchError, match=r"runs are of another version \(shufflerl 0\.0\."):
            reproduce(TINY, undisturbed, figures=SOME)
    finally:
        manifest.write_text(text)
    assert before == {path: path.read_bytes() for path in undisturbed.rglob("*") if path.is_file()}


def test_without_permission_to_write_it_says_so(tmp_path: Path) -> None:
    """The system's own refusal: as another user where the tests run as root, whom nothing is refused."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    unprivileged = "import os\nif os.geteuid() == 0:\n    os.setgid(65534)\n    os.setuid(65534)\n"
    attempt = (
        "from shufflerl.errors import StorageError\ntry:\n    run(workers=1)\nexcept StorageError as e:\n    print(e)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", f"{SCRIPT}\n{unprivileged}{attempt}", str(closed / "out")],
        capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert "Permission denied" in ended.stdout, ended.stderr
    assert "choose another folder" in ended.stdout
    assert list(closed.iterdir()) == []


def test_a_full_disk_stops_the_report_cleanly_and_it_is_written_later(undisturbed: Path, tmp_path: Path) -> None:
    """The system refuses to let files grow beyond less than a figure needs, and more than a result does."""
    limit = (
        "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (18000, 18000))\n"
    )
    for phase in (TUNING, RUNS, TIMINGS):
        subprocess.run(["cp", "-r", str(undisturbed / phase), str(tmp_path)], check=True)
    attempt = (
        "from shufflerl.errors import StorageError\ntry:\n    run(workers=1)\nexcept StorageError as e:\n    print(e)"
    )
    before = finished(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-c", f"{SCRIPT}\n{limit}{attempt}", str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert "File too large" in ended.stdout, ended.stderr
    assert "run the same command again" in ended.stdout
    assert [path for path in tmp_path.rglob("*") if "partial" in path.name] == []
    assert list((tmp_path / "figures").iterdir()) == []
    reproduce(TINY, tmp_path, workers=1, figures=SOME)
    assert finished(tmp_path) == before
    same(tmp_path, undisturbed)


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"Not a directory.*choose another folder"):
        reproduce(TINY, tmp_path / "file" / "out", figures=SOME)


def test_the_command_prints_the_verdicts_and_the_page(
    undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(base, "QUICK", TINY)
    defaults: dict[str, object] = reproduce.__kwdefaults__ or {}
    monkeypatch.setitem(defaults, "figures", SOME)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "argv", ["shufflerl", "reproduce", "--quick", "--out", str(undisturbed), "--workers", "1"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr()
    assert stop.value.code == 0
    assert f"Report: {undisturbed / 'report.html'}" in said.out
    assert f"The paper's own figures: {undisturbed / 'figures' / 'overview.png'}\n" in said.out
    lines = [line for line in said.out.splitlines() if str(undisturbed) not in line]
    verdicts = ("holds ", "not at this K ", "not settled ", "from K = ")
    assert all(line.startswith(verdicts) and len(line) <= 80 for line in lines)
    assert [line for line in lines if line.endswith("  Bandit, ε = 1: SDP-PE below UCBVI-LDP")]
    assert f"Resuming {undisturbed / TUNING}" in said.err
    assert f"Resuming {undisturbed / RUNS}" in said.err


# Two machines under the command line itself; one is killed while it runs a cell, which it does until then.
CLUSTER = """
import threading, time
import ray
from ray.cluster_utils import Cluster
from shufflerl import cli
from shufflerl.experiments import engine
from shufflerl.experiments.figures import base

machine = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={**machine, "include_dashboard": False})
other = cluster.add_node(**machine)
ray.init(address=cluster.address, log_to_driver=False)
run_here, started = engine.run_here, Path(sys.argv[1] + ".started")

def held(cell, expected, started=str(started), doomed=other.node_id, run_here=run_here):
    if ray.get_runtime_context().get_node_id() == doomed:
        open(started, "w").close()
        time.sleep(600)
    return run_here(cell, expected)

def lose():
    while not started.exists():
        time.sleep(0.01)
    cluster.remove_node(other, allow_graceful=False)

engine.run_here = held
base.QUICK = TINY
reproduce.__kwdefaults__["figures"] = SOME
losing = threading.Thread(target=lose, daemon=True)
losing.start()
sys.argv = ["shufflerl", "reproduce", "--quick", "--out", sys.argv[1], "--backend", "ray"]
try:
    cli.main()
except SystemExit as stop:
    losing.join()
    print("ended", stop.code, "lost", not losing.is_alive(), flush=True)
ray.shutdown()
cluster.shutdown()
"""


def test_the_command_on_a_ray_cluster_that_loses_a_machine_gives_the_same(undisturbed: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT + CLUSTER, str(tmp_path / "out")],
        capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert "ended 0 lost True" in ended.stdout, ended.stderr
    same(tmp_path / "out", undisturbed)


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    sweep, notes = tmp_path / "sweep", tmp_path / "notes"
    for folder, name in ((sweep, store.MANIFEST), (notes, "diary.txt")):
        folder.mkdir()
        (folder / name).write_text("{}")
        with pytest.raises(StateMismatchError, match=f"{name}, .*choose a new or empty"):
            reproduce(TINY, folder, workers=1, figures=SOME)
        assert [entry.name for entry in folder.iterdir()] == [name]


def test_a_legend_is_never_wider_than_its_figure() -> None:
    drawing, (axes,) = style.panels(width=4.0)
    for number in range(6):
        axes.plot([0, 1], [0, number], label=f"a line of a rather long name, {number}")
    style.legend_below(drawing, axes, 3)
    (legend,) = drawing.legends
    assert legend.get_window_extent().width <= drawing.bbox.width


def test_the_legends_of_all_figures_are_whole(everything: tuple[Path, report.Reproduction]) -> None:
    """Nothing but white at the left and right edges of the lowest fifth, where legends are."""
    folder, _ = everything
    for figure in FIGURES:
        pixels = image.imread(folder / report.FIGURES / f"{figure.name}.png")[..., :3]
        lowest = pixels[-len(pixels) // 8 :]
        assert (lowest[:, [0, -1]] == 1).all(), figure.name


def test_few_seeds_are_cautioned_of(everything: tuple[Path, report.Reproduction]) -> None:
    assert "intervals are too narrow" in everything[1].page.read_text()
