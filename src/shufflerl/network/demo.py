"""The whole system on one machine: three roles as separate processes on loopback, learning from simulated users."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from shufflerl import envs, learners, policies
from shufflerl.envs.sensing import SpectrumSensing
from shufflerl.errors import InvalidInputError, LostWorkersError
from shufflerl.mdp import MDP, Mixture
from shufflerl.network import roles
from shufflerl.network.protocol.crypto import SigningKey
from shufflerl.planning import mixture_value
from shufflerl.policies import Network, Scores

DELTA = 1e-5
#: Users, unless told how many: what takes about a minute on two cores, with episodes of tables and of real processes.
TABLE_USERS, RETURN_USERS = 5000, 3000
#: Fresh episodes that a policy is judged by where there is no table of its environment.
JUDGED = 100
#: How many times a batch's users are drawn for it: all are on line, so half as many would do.
ADMISSION = 2
# Of every batch, in the figures.
_SHOWN = ("batch", "users", "transport", "messages", "noise", "noise_sd")


@dataclass(frozen=True)
class Demo:
    """What is demonstrated."""

    users: int
    env: str
    learner: str
    epsilon: float
    seed: int
    transport: str = "tags"
    noise: str = "servers"

    @property
    def min_batch_size(self) -> int:
        """Fewest users mixed: the first batches of a short run are small."""
        return min(30, self.users)

    @property
    def learner_parameters(self) -> str:
        """Of the learner, as TOML: every batch costs its messages, so few of them, and none too small to be mixed."""
        few = learners.batch_parameters(self.learner, self.min_batch_size, self.users)
        return f"learner_parameters = {{ {', '.join(f'{name} = {value}' for name, value in few.items())} }}\n"


def chosen(users: int | None, env: str, learner: str | None, **others: Any) -> Demo:
    """A demonstration of what was chosen; the rest goes by the environment."""
    made = envs.make(env, 0)
    if isinstance(made, envs.GymSimulator):
        raise InvalidInputError(f"{env} has no table of its transitions; the demonstration cannot tell what is best.")
    users = users or (TABLE_USERS if isinstance(made, MDP) else RETURN_USERS)
    problem = made.problem(users)
    name = learner or learners.DEFAULTS[type(problem)]
    learners.make(name, problem, 0)  # a learner of other problems is refused here
    return Demo(users, env, name, **others)


class Role:
    """A process of the demonstration; its standard output's first line says where it listens."""

    def __init__(self, name: str, folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.name = name
        self._log = (folder / f"{name}.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shufflerl", name, *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self.log = folder / f"{name}.log"

    def heard(self) -> dict[str, Any]:
        """The next line it says, as JSON."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            last = self.log.read_text(errors="replace").strip()[-500:]
            raise LostWorkersError(f"The {self.name} ended with code {self.process.returncode}. It last said: {last}")
        message: dict[str, Any] = json.loads(line)
        return message

    def stop(self) -> None:
        """Ask it to end, and see to it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()


@contextlib.contextmanager
def system(setting: Demo, folder: Path, environment: dict[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Shuffler, coordinator and fleet, running; ended when the block ends."""
    started: list[Role] = []
    parameters = setting.learner_parameters
    budget = ("--epsilon", str(setting.epsilon), "--delta", str(DELTA))
    mixing = ("--min-batch-size", str(setting.min_batch_size))
    workers = str(min(2, os.cpu_count() or 1))  # more would be faster, and more memory than a demonstration may take
    coordinator_key = str(SigningKey.load(folder / "coordinator" / "identity.pem").public)
    enrolment_key = str(SigningKey.load(folder / "enrolment" / roles.ENROLMENT).public)

    def start(name: str, *arguments: str) -> Role:
        started.append(Role(name, folder, *arguments, environment=environment))
        return started[-1]

    try:
        shuffler = start(
            *("shuffler", "--folder", str(folder / "shuffler"), "--listen", "127.0.0.1:0"),
            *("--coordinator-key", coordinator_key, "--enrolment-key", enrolment_key, *mixing),
        )
        shuffler_said = shuffler.heard()
        shuffler_at = f"http://127.0.0.1:{shuffler_said['port']}"
        settings = folder / "coordinator.toml"
        settings.write_text(parameters)
        coordinator = start(
            *("coordinator", str(settings), "--folder", str(folder / "coordinator"), "--listen", "127.0.0.1:0"),
            *("--shuffler", shuffler_at, "--environment", setting.env, "--learner", setting.learner, *budget),
            *("--episodes", str(setting.users), "--seed", str(setting.seed), "--transport", setting.transport),
            *("--noise", setting.noise, "--admission", str(ADMISSION)),
            *("--workers", workers, "--poll-seconds", "0.05"),
        )
        coordinator_said = coordinator.heard()
        roles.mint_tokens(folder / "enrolment", setting.users, folder / "tokens.txt")
        fleet = start(
            *("node", "--folder", str(folder / "nodes"), "--shuffler", shuffler_at, *budget, *mixing),
            *("--noise", setting.noise),
            *("--task", coordinator_said["task"], "--coordinator-key", coordinator_key),
            *("--shuffler-key", shuffler_said["key"], "--tokens", str(folder / "tokens.txt")),
            *("--environment", setting.env, "--workers", workers, "--poll-seconds", "0.05"),
        )
        yield {
            "shuffler": shuffler,
            "coordinator": coordinator,
            "fleet": fleet,
            "shuffler_at": shuffler_at,
            "coordinator_at": f"http://127.0.0.1:{coordinator_said['port']}",
        }
    finally:
        for role in reversed(started):
            role.stop()


def run(setting: Demo, folder: Path | None = None, *, quiet: bool = False) -> dict[str, Any]:
    """Learn from the users, and tell what came of it."""
    with learned(setting, folder, quiet=quiet) as figures:
        return figures


@contextlib.contextmanager
def learned(
    setting: Demo,
    folder: Path | None = None,
    *,
    quiet: bool = False,
    started: Callable[[str, str], None] = lambda coordinator, shuffler: None,
) -> Iterator[dict[str, Any]]:
    """What came of learning from the users, with coordinator and shuffler still running; `started` is told where."""
    with contextlib.ExitStack() as stack:
        place = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shufflerl-"))) if folder is None else folder
        )
        place.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        parts = stack.enter_context(system(setting, place))
        started(parts["coordinator_at"], parts["shuffler_at"])
        with httpx2.Client(base_url=parts["coordinator_at"], timeout=30.0, trust_env=False) as client:
            learning = time.monotonic()
            _watch(client, parts, quiet=quiet)
            seconds = time.monotonic() - learning
            figures = _figures(setting, client, parts)
        figures["seconds"] = round(time.monotonic() - began, 1)
        figures["reports_per_second"] = round(setting.users / seconds, 1)
        yield figures


def _watch(client: httpx2.Client, parts: dict[str, Any], *, quiet: bool) -> None:
    """Show progress until the run is over; give up if a role ended."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("learning")
        while True:
            status = client.get("/v1/status").json()
            shuffler = status["shuffler_says"] or {}
            extra = shuffler.get("accepted", 0) if shuffler.get("batch") == status["batch"] else 0
            what = "done" if status["finished"] else f"batch {status['batch']}, {shuffler.get('state', 'announced')}"
            bar.update(task, completed=status["episodes_played"] + extra, total=status["episodes"], description=what)
            if status["finished"]:
                return
            for name in ("shuffler", "coordinator", "fleet"):
                code = parts[name].process.poll()
                if code is not None and (name != "fleet" or code != 0):
                    last = parts[name].log.read_text(errors="replace").strip()[-500:]
                    raise LostWorkersError(
                        f"The {name} ended with code {code} before the run did. It last said: {last}"
                    )
            time.sleep(0.1)


def _figures(setting: Demo, client: httpx2.Client, parts: dict[str, Any]) -> dict[str, Any]:
    status = client.get("/v1/status").json()
    policy = client.get("/v1/policy").json()
    certificate = client.get("/v1/certificate").json()
    batches = client.get("/v1/batches").json()["batches"]
    metrics = httpx2.get(f"{parts['shuffler_at']}/metrics", trust_env=False).text
    fleet = parts["fleet"].heard()
    mixture = Mixture(policy["policies"], policy["weights"], policies.parse(policy["family"]))
    return {
        "users": setting.users,
        "environment": setting.env,
        "learner": setting.learner,
        "noise": setting.noise,
        "value": value_learned(setting.env, mixture),
        "policy": policy,
        "certificate": certificate,
        "batches": [{key: batch[key] for key in _SHOWN} for batch in batches],
        "saw": {
            "node": "its own episode",
            "shuffler": {
                "reports": int(_metric(metrics, "shufflerl_reports_accepted_total")),
                "bytes": fleet["uploaded_bytes"],
                "messages_in_clear": 0,
            },
            "coordinator": {"messages": status["messages"], "origins": 0, "noisy_counts": len(batches)},
        },
        "verdicts": fleet["verdicts"],
        "peak_mb": {name: roles.peak_memory(parts[name].process.pid) for name in ("shuffler", "coordinator")}
        | {"fleet": fleet["peak_mb"]},
    }


def _metric(text: str, name: str) -> float:
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


def value_learned(env: str, mixture: Mixture) -> dict[str, float | None]:
    """What an episode earns with what was learned, at random, and at best as far as that is known.

    By the table of an MDP; else by fresh episodes in the environment's own units, at random under policies drawn at
    random, and at best no more than the best policy known or the range of returns allows.
    """
    made = envs.make(env, 0)
    if isinstance(made, MDP):
        learned = mixture_value(made, mixture)
        return {"learned": learned, "random": _random_value(made), "optimal": made.optimal_value}
    assert isinstance(made, envs.Player | envs.SensingTiles)
    rng = np.random.default_rng()
    game = made.game if isinstance(made, envs.SensingTiles) else made
    given = rng.choice(len(mixture.weights), size=JUDGED, p=mixture.weights)
    drawn = Mixture(rng.standard_normal((JUDGED, *mixture.family.shape)), np.full(JUDGED, 1 / JUDGED), mixture.family)
    return {
        "learned": float(made.returns(mixture, given, rng).mean()),
        "random": float(made.returns(drawn, np.arange(JUDGED), rng).mean()),
        "optimal": game.best_known(10 * JUDGED, rng) if isinstance(game, SpectrumSensing) else game.high,
    }


def _random_value(mdp: MDP) -> float:
    """Expected reward of a user who acts at random."""
    value = np.zeros(mdp.n_states)
    for h in reversed(range(mdp.horizon)):
        ahead = mdp.transitions[h] @ value if h < mdp.horizon - 1 else 0.0
        value = (mdp.rewards[h] + ahead).mean(axis=1)
    return float(mdp.start @ value)


def policy_text(policy: dict[str, Any]) -> str:
    """The likeliest policy of a mixture, for people: what it does, and who else has another."""
    family, numbers = policies.parse(policy["family"]), len(policy["weights"])
    heaviest = int(np.argmax(policy["weights"]))
    share, shown = policy["weights"][heaviest], policy["policies"][heaviest]
    if isinstance(family, Network):
        lines = _network_lines(family, shown)
    elif isinstance(family, Scores):
        lines = ["Rows are states, columns actions; the action whose state has the largest score is taken."]
        lines += [f"state {x}: {' '.join(f'{score:.3f}' for score in row)}" for x, row in enumerate(shown[:20])]
    else:
        lines = ["Rows are steps, columns states, entries actions."]
        lines += [f"step {step}: {' '.join(str(action) for action in row)}" for step, row in enumerate(shown, 1)]
    if numbers > 1:
        lines.append(f"(given to {share:.0%} of users; the others have one of {numbers - 1} more)")
    return "\n".join(lines)


def _network_lines(family: Network, parameters: list[float]) -> list[str]:
    """A linear policy as its formulas; a deeper one by the sizes of its layers."""
    sizes = " to ".join(map(str, family.layers))
    rule = {
        "choice": "It takes the action with the largest value; action 0 has value 0.",
        "score": f"It takes the largest value of {family.actions} alike parts of what is observed.",
        "box": "Each coordinate of its action is the tanh of its value, stretched to the range of actions.",
    }[family.head]
    lines = [f"A {'linear policy' if family.kind == 'linear' else 'network'} of {family.size} numbers, {sizes}. {rule}"]
    if family.hidden or family.layers[0] > 12:
        return [*lines, "Its numbers are in --json."]
    inputs, outputs = family.layers
    table = np.asarray(parameters).reshape(inputs + 1, outputs).T
    first = 1 if family.head == "choice" else 0
    for output, (*weights, bias) in enumerate(table[:20]):
        terms = [f"{weight:+.3g} x{i}" for i, weight in enumerate(weights)]
        name = {"choice": f"action {first + output}", "box": f"coordinate {output}", "score": "part"}[family.head]
        lines.append(f"{name}: {' '.join([*terms, f'{bias:+.3g}'])}")
    return lines


def _seen(figures: dict[str, Any]) -> str:
    """What the coordinator saw, by the transports that were used."""
    of = {how: [batch for batch in figures["batches"] if batch["transport"] == how] for how in ("tags", "sums")}
    messages = {how: f"{sum(batch['messages'] for batch in batches):,}" for how, batches in of.items()}
    alike = "users' and dummies alike" if figures["noise"] == "servers" else "true and noise alike"
    sentences = {
        "tags": f"{messages['tags']} messages in random order, {alike}",
        "sums": f"{messages['sums']} random seeds of masks in random order and {len(of['sums'])} sums",
    }
    return "; ".join(sentences[how] for how, batches in of.items() if batches)


def _gain(value: dict[str, float]) -> float:
    return (value["learned"] - value["random"]) / (value["optimal"] - value["random"])


def as_text(figures: dict[str, Any]) -> str:
    """The figures for a reader."""
    value, saw, memory = figures["value"], figures["saw"], figures["peak_mb"]
    best = "" if value["optimal"] is None else f", {value['optimal']:.5g} at best: {_gain(value):.0%} of the way"
    return "\n".join(
        [
            f"{figures['users']:,} users taught {figures['learner']} {figures['environment']} in "
            f"{len(figures['batches'])} batches, {figures['seconds']:.0f} s, "
            f"{figures['reports_per_second']:,.0f} reports/s.",
            "",
            "Learned policy",
            policy_text(figures["policy"]),
            "",
            f"Value per episode: {value['learned']:.5g} learned, {value['random']:.5g} at random{best}.",
            "",
            figures["certificate"]["text"],
            "",
            "What each party saw",
            "  a node       its own episode, and no other's report",
            f"  shuffler     {saw['shuffler']['reports']:,} reports and where they came from, "
            f"{saw['shuffler']['bytes'] / 1e6:,.1f} MB sealed; not one message in clear",
            f"  coordinator  {_seen(figures)}; not one origin",
            "",
            "Peak memory: " + ", ".join(f"{name} {mb:.0f} MB" for name, mb in memory.items() if mb is not None),
        ]
    )
