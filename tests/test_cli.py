from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.progress import Progress, TaskID

import shufflerl
from shufflerl import cli, options
from shufflerl.experiments import setting as settings
from shufflerl.experiments.setting import Setting
from tests.support import commands

Call = Callable[..., tuple[object, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run the command line in this process: (exit code or message, stdout)."""

    return lambda *arguments: commands.call(capsys, monkeypatch, *arguments, columns=120)[:2]


def test_version(call: Call) -> None:
    assert call("version") == (0, f"{shufflerl.__version__}\n")
    assert call("--version") == (0, f"{shufflerl.__version__}\n")


def test_envs_lists_every_environment(call: Call) -> None:
    code, text = call("envs")
    assert code == 0
    for name in ("riverswim", "bandit", "spectrum", "deepsea", "random", "gymnasium"):
        assert name in text
    code, text = call("envs", "--json")
    assert json.loads(text)["riverswim"]["parameters"] == {"n_states": 4, "horizon": 6, "permuted": False}


RUN = ("run", "riverswim", "--learner", "ucbvi", "--privatizer", "none", "--episodes", "500")


def test_run_prints_one_json_object(call: Call) -> None:
    code, text = call(*RUN, "--seeds", "3", "--seed", "5", "--json")
    assert code == 0
    figures = json.loads(text)
    expected = {"env", "learner", "privatizer", "episodes", "seeds", "regret", "switches", "optimal_value"}
    assert expected | {"certificate", "seconds"} <= set(figures)
    assert (figures["episodes"], figures["seeds"], figures["certificate"]) == (500, 3, None)
    assert set(figures["regret"]) == {"mean", "sd", "per_seed"}
    assert figures["regret"]["mean"] == pytest.approx(sum(figures["regret"]["per_seed"]) / 3)
    assert figures["optimal_value"] == pytest.approx(0.4758, abs=5e-5)
    _, alone = call(*RUN, "--seed", "6", "--json")
    assert json.loads(alone)["regret"]["per_seed"] == figures["regret"]["per_seed"][1:2]
    assert json.loads(alone)["regret"]["sd"] is None


def test_run_prints_a_table_and_saves_a_figure(call: Call, tmp_path: Path) -> None:
    figure = tmp_path / "deep" / "regret.png"
    code, text = call(*RUN, "--plot", str(figure), "--env-param", "n_states=6", "--learner-param", "scale=0.2")
    assert code == 0
    assert "riverswim (n_states=6)" in text
    assert "ucbvi (scale=0.2)" in text
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in figure.parent.iterdir()] == ["regret.png"]


def test_json_stays_one_object_when_a_figure_is_saved(call: Call, tmp_path: Path) -> None:
    code, text = call(*RUN, "--json", "--plot", str(tmp_path / "regret.svg"))
    assert code == 0
    assert json.loads(text)["env"] == "riverswim"
    assert (tmp_path / "regret.svg").exists()


@pytest.mark.parametrize("name", ["regret.nonsense", "file/regret.png"])
def test_a_figure_that_cannot_be_saved_is_refused_before_the_run(
    call: Call, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(settings, "run_seeds", lambda *_: pytest.fail("it was run"))
    code, text = call(*RUN, "--json", "--plot", str(tmp_path / name))
    assert str(code).startswith("shufflerl: Cannot write ")
    assert text == ""


def test_progress_over_seeds_rises_to_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, float | None]] = []
    update = Progress.update

    def watched(self: Progress, task: TaskID, **fields: Any) -> None:
        update(self, task, **fields)
        if "completed" in fields:  # the rest are words, such as "compiling"
            seen.append((self.tasks[0].completed, self.tasks[0].total))

    monkeypatch.setattr(Progress, "update", watched)
    setting = Setting("riverswim", "ucbvi", "none", 300, learner_parameters={"batch": 100})
    cli.run_with_progress(setting, range(5, 8), quiet=True)
    assert seen == [(100.0 * step, 900) for step in range(1, 10)]


@pytest.mark.slow
def test_an_error_is_the_only_line_on_stderr() -> None:
    command = [sys.executable, "-c", "from shufflerl.cli import main; main()", "run", "bandit", "--learner-param"]
    done = subprocess.run([*command, "first=0"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("shufflerl: first is 0")


@pytest.mark.slow
def test_our_environments_are_known_to_gymnasium_in_any_order() -> None:
    command = [sys.executable, "-c", "from shufflerl.cli import main; main()", "run", "gymnasium", "--episodes", "20"]
    options = ["--env-param", "id=shufflerl/RiverSwim-v0", "--env-param", "horizon=3", "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["regret"]["mean"] is None


def test_a_gymnasium_environment_is_told_in_its_own_units_and_without_colour_codes(
    call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = call("run", "gymnasium", "--env-param", "id=CliffWalking", "--env-param", "horizon=14", *RUN[2:])
    assert code == 0
    assert "13.8700 per episode, -13.0000 in its own units" in text
    code, _ = call("run", "gymnasium", "--env-param", "id=Taxi-v3", "--env-param", "horizon=2")
    assert "Taxi-v4" in str(code)
    assert "\x1b" not in str(code)
    assert cli.without_colours("\x1b[33mWARN: old\x1b[0m") == "WARN: old"


@pytest.mark.parametrize("wrong", ["1.5", "many", "inf"])
def test_a_count_that_is_none_is_refused_with_a_sentence(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shufflerl", "run", "riverswim", "--episodes", wrong])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    said = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert f"'{wrong}' is no whole number; write it as 20000 or 2e4." in said


def test_an_environment_without_a_table_is_played(call: Call) -> None:
    arguments = ["id=Blackjack-v1", "horizon=5", "reward_low=-1", "reward_high=1"]
    options = [item for argument in arguments for item in ("--env-param", argument)]
    learner = ("--learner", "ucbvi", "--learner-param", "batch=20")
    code, text = call("run", "gymnasium", "--episodes", "60", *learner, "--json", *options)
    assert code == 0
    figures = json.loads(text)
    assert figures["regret"]["mean"] is None
    assert 0 < figures["reward_per_episode"] <= 5


def test_a_private_run_carries_its_certificate(call: Call) -> None:
    options = ("--epsilon", "1")
    code, text = call("run", "riverswim", "--episodes", "500", *options, "--json")
    assert code == 0
    figures = json.loads(text)
    assert (figures["learner"], figures["privatizer"]) == ("optimistic", "shuffle"), (
        "what a budget is spent on by default"
    )
    assert figures["certificate"]["epsilon"] == pytest.approx(1.0, abs=1e-3)
    assert figures["certificate"]["delta"] == 1e-5
    assert figures["certificate"]["changed_counters"] == 22
    code, text = call("run", "riverswim", "--episodes", "500", *options, "--privatizer-param", "gamma=0.5")
    assert code == 0
    assert "shuffle (gamma=0.5)" in text
    assert "differential privacy, shuffle model" in text
    assert "sd 24.78 on each counter of a batch" in text


@pytest.mark.slow
def test_the_papers_learner_tells_its_stages(call: Call) -> None:
    arguments = ("run", "riverswim", "--learner", "sdp-pe", "--privatizer", "shuffle", "--epsilon", "5")
    code, text = call(*arguments, "--trace", "--explain")
    assert code == 0
    assert "Stages of the first seed" in text
    assert "per action" in text
    assert " stayed." in text
    code, text = call(*arguments, "--episodes", "2000", "--learner-param", "constants=paper", "--json")
    stages = json.loads(text)["trace"]
    assert sum(stage["users"] for stage in stages) == 2000
    assert stages[0]["radius"] > 1
    code, text = call(*RUN, "--trace")
    assert "does not proceed in stages" in text


def test_calibrate(call: Call) -> None:
    code, text = call("calibrate", "--epsilon", "1", "--delta", "1e-5", "--horizon", "6", "--json")
    assert code == 0
    figures = json.loads(text)
    keys = {"epsilon", "delta", "changed_counters", "lambda", "noise_sd", "messages_per_user", "law"}
    assert set(figures) == keys | {"true_epsilon", "paper"}
    assert set(figures["paper"]) == keys | {"true_epsilon"}
    code, text = call("calibrate", "--epsilon", "1")
    assert "353.9" in text
    rows = {line[:20].strip(): line[20:].split() for line in text.splitlines()}
    assert rows["budget epsilon"] == ["1", "1"]
    assert rows["true epsilon"] == ["1", "0.03722"]


def test_noise_by_the_servers_is_calibrated_and_certified(call: Call) -> None:
    servers = ("--noise", "servers", "--horizon", "1")
    code, text = call("calibrate", "--epsilon", "1", *servers, "--json")
    assert code == 0
    figures = json.loads(text)
    assert figures["law"] == "discrete laplace"
    assert figures["messages_per_user"] == 1
    assert figures["noise_sd"] <= 4
    code, text = call("certify", "--scale", "2", "--shift", "24", *servers)
    assert code == 0
    assert text.startswith("(1, 1e-05)-differential privacy in the shuffle model")
    assert "separate servers" in text
    assert call("certify", *servers)[0] != 0


@pytest.mark.parametrize("epsilon", ["0.1", "0.3", "1", "2.5"])
def test_the_noise_that_is_printed_keeps_to_the_budget(call: Call, epsilon: str) -> None:
    """Not a digit less than what was calibrated, and no epsilon is printed below what it costs."""
    printed = call("calibrate", "--epsilon", epsilon)[1]
    mean = printed.partition("(lambda)")[2].split()[0].replace(",", "")
    figures = json.loads(call("certify", "--lambda", mean, "--json")[1])
    assert figures["epsilon"] <= float(epsilon)
    shown = call("certify", "--lambda", mean)[1]
    assert figures["epsilon"] <= float(shown[1:].partition(",")[0]) <= float(epsilon)


def strict(text: str) -> Any:
    """Parse JSON as the standard has it."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_budget_that_is_not_given_is_one(call: Call) -> None:
    assert call("calibrate", "--noise", "servers", "--json") == call(
        "calibrate", "--noise", "servers", "--epsilon", "1", "--json"
    )


def test_where_the_papers_constants_are_beyond_drawing_ours_still_show(call: Call) -> None:
    code, text = call("calibrate", "--epsilon", "1e-9", "--json")
    assert code == 0
    assert strict(text)["paper"]["noise_sd"] is None
    sd = strict(text)["noise_sd"]
    assert sd > 1e5
    code, text = call("calibrate", "--epsilon", "1e-9")
    assert code == 0
    assert text.count("beyond what can be drawn") == 4
    assert f"{sd:,.1f}" in text


@pytest.mark.filterwarnings("ignore::shufflerl.errors.PrivacyWarning")
def test_where_no_epsilon_can_be_certified_json_is_null_and_text_says_so(call: Call) -> None:
    code, text = call("certify", "--lambda", "1", "--json")
    assert code == 0
    assert strict(text)["epsilon"] is None
    code, text = call("certify", "--lambda", "1")
    assert code == 0
    assert text.startswith("No epsilon can be certified at delta 1e-05")
    assert "inf" not in text
    code, text = call("calibrate", "--epsilon", "800", "--json")
    assert code == 0
    assert strict(text)["paper"]["epsilon"] is None
    assert strict(text)["true_epsilon"] < 10
    code, text = call("calibrate", "--epsilon", "800")
    assert "none can be certified" in text


def test_json_holds_no_number_that_is_none() -> None:
    assert cli.to_json({"a": [math.inf, (1.5, -math.inf)], "b": None}) == '{"a": [null, [1.5, null]], "b": null}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        cli.to_json([math.nan])


def test_certify(call: Call) -> None:
    code, text = call("certify", "--lambda", "307.2", "--delta", "1e-5", "--horizon", "6", "--json")
    assert code == 0
    assert json.loads(text)["epsilon"] == pytest.approx(1.0, abs=1e-3)
    code, text = call("certify", "--lambda", "307.2")
    assert "differential privacy in the shuffle model" in text
    assert "honest shuffler" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("calibrate", "--epsilon", "-1"), "epsilon is -1.0"),
        (("calibrate", "--epsilon", "1", "--delta", "1e-15"), "the accountant's rounding error"),
        (("calibrate", "--epsilon", "1", "--gamma", "2"), "gamma is 2.0; expected a finite number in (0, 1]."),
        (("calibrate", "--epsilon", "1e-9", "--delta", "1e-11"), "epsilon is 1e-09 and delta 1e-11: this needs about"),
        (("certify", "--lambda", "0"), "mean of the noise is 0.0"),
        (("run", "riverswim", "--privatizer", "shuffle"), "needs a budget; give epsilon"),
        (("run", "riverswim", "--privatizer", "none", "--epsilon", "1"), "takes no epsilon"),
        (("run", "riverswin"), "no environment 'riverswin'. Did you mean 'riverswim'?"),
        (("run", "riverswim", "--learner", "ucbiv"), "Did you mean 'ucbvi'?"),
        (("run", "riverswim", "--privatizer", "non"), "Did you mean 'none'?"),
        (("run", "riverswim", "--env-param", "state=3"), "no parameter 'state'. Did you mean 'n_states'?"),
        (("run", "riverswim", "--env-param", "n_states"), "write it as key=value"),
        (("run", "riverswim", "--env-param", "n_states=four"), "is 'four'; expected int"),
        (
            ("run", "riverswim", "--learner", "ucbvi", "--learner-param", "scale=-1"),
            "scale is -1.0; expected a finite number in (0, inf)",
        ),
        (("run", "riverswim", "--episodes", "0"), "episodes is 0"),
        (("run", "riverswim", "--seeds", "0"), "seeds is 0"),
        (("run", "riverswim", "--seed", "-1"), "seed is -1"),
        (("run", "gymnasium"), "needs the parameter 'id'"),
        (("run", "riverswim", "--env-param", "n_states=100000"), "a table of transitions of 745 GiB"),
        (("run", "random", "--env-param", "n_states=100000"), "a table of transitions of 894 GiB"),
        (("run", "deepsea", "--env-param", "size=5000"), "a table of transitions of 1,863 GiB"),
        (("run", "bandit", "--env-param", "n_actions=10000000000"), "a table of transitions of 75 GiB"),
        (("run", "spectrum", "--env-param", "n_channels=5000"), "a table of transitions of"),
        (("run", "riverswim", "--env-param", "horizon=3", "--env-param", "horizon=4"), "'horizon' of environment"),
        (("run", "riverswim", "--episodes", "1" + "0" * 400), "at most 1000000000000000000"),
        (("run", "riverswim", "--episodes", "10", "--plot", "x.nonsense"), "Use a name ending in .png"),
    ],
)
def test_mistakes_end_in_one_clear_line(
    call: Call,
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _ = call(*arguments)
    assert str(code).startswith("shufflerl: ")
    assert message in str(code)
    assert "\n" not in str(code)
    assert not list(tmp_path.iterdir())


def test_starting_up_imports_nothing_heavy() -> None:
    heavy = "{'numpy', 'numba', 'scipy', 'matplotlib'}"
    script = f"import sys, shufflerl, shufflerl.cli; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_public_name_can_be_imported() -> None:
    for name in shufflerl.__all__:
        assert getattr(shufflerl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'lern'"):
        shufflerl.lern  # noqa: B018


def test_delta_is_explained_alike_everywhere_and_is_no_probability_of_failure() -> None:
    commands = typer.main.get_command(cli.app).commands.values()  # type: ignore[attr-defined]
    told = {option.help for command in commands for option in command.params if option.name == "delta"}
    assert told == {options.DELTA_HELP}
    assert "probability" not in options.DELTA_HELP.lower()
