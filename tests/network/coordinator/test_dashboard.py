"""What the pages are made of: files that need nothing from elsewhere, events, and what they tell of a run."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest
from starlette.testclient import TestClient

from shufflerl import learners
from shufflerl.envs.riverswim import riverswim
from shufflerl.errors import InvalidInputError, UnknownNameError
from shufflerl.learners import LEARNERS
from shufflerl.loop import learn
from shufflerl.network import demo
from shufflerl.network.config import CoordinatorConfig
from shufflerl.network.coordinator.app import CoordinatorServer
from shufflerl.network.coordinator.coordinator import Coordinator
from shufflerl.network.coordinator.dashboard import learned
from shufflerl.network.coordinator.run import Run
from shufflerl.network.demo import Demo
from shufflerl.network.shuffler.app import ShufflerServer
from shufflerl.network.web import watching
from shufflerl.population import CountPopulation
from shufflerl.privacy.accounting import Budget
from shufflerl.privatizers.none import NoPrivacy
from tests.network.coordinator.test_coordinator import MDP, RUN, answer
from tests.network.web.test_http import coordinator_app, problem_of, reports_path, serving, upload_of
from tests.support.dashboard_states import COORDINATOR, Stage
from tests.support.network_world import World
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.filterwarnings("ignore::shufflerl.errors.PrivacyWarning")

PAGES = resources.files("shufflerl.network.web") / "pages"


def test_the_pages_need_nothing_from_elsewhere(tmp_path: Path) -> None:
    with TestClient(coordinator_app(tmp_path)) as client:
        page = client.get("/")
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none';")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page.text)
        wanted = re.findall(r'(?:href|src)="(pages/[^"]+)"', page.text)
        assert len(wanted) == 4
        for name in wanted:
            assert client.get(name).status_code == 200
        assert client.get("/pages/style.css").headers["content-type"].startswith("text/css")
    for file in PAGES.iterdir():
        assert not re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[a-z]", file.read_text()), file.name


def test_files_are_served_by_name_and_once(tmp_path: Path) -> None:
    with TestClient(coordinator_app(tmp_path)) as client:
        for name in ("no.css", "..%2fcoordinator_app.py", "%2e%2e", "coordinator.html%00"):
            assert problem_of(client.get(f"/pages/{name}"))[1] == "not-found"
        first = client.get("/pages/style.css")
        again = client.get("/pages/style.css", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@contextmanager
def events(port: int) -> Iterator[Iterator[dict[str, str]]]:
    """Events as a browser reads them."""

    def read(answer: httpx2.Response) -> Iterator[dict[str, str]]:
        one: dict[str, str] = {}
        for line in answer.iter_lines():
            if line:
                name, _, value = line.partition(": ")
                one[name] = value
            elif one:
                yield one
                one = {}

    with httpx2.stream("GET", f"http://127.0.0.1:{port}/v1/events", trust_env=False, timeout=PATIENCE) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield read(answer)


def test_events_tell_everything_at_once_and_then_what_changes() -> None:
    stage = Stage("coordinator.html", dict(COORDINATOR["filling"]))
    with serving(stage.app) as port, events(port) as told:
        assert next(told) == {"retry": str(watching.RETRY)}
        first, second = next(told), next(told)
        assert [first["event"], second["event"]] == ["status", "learned"]
        assert json.loads(first["data"]) == stage.parts["status"]
        stage.parts["status"] = COORDINATOR["finished"]["status"]
        third = next(told)
        assert third["event"] == "status"
        assert json.loads(third["data"])["finished"]
        assert [int(one["id"]) for one in (first, second, third)] == [1, 2, 3]


def test_open_streams_end_with_their_server() -> None:
    """In order, so that nobody waits for them: one that is cut off is an error to read."""
    with ExitStack() as later:
        with serving(Stage("coordinator.html", dict(COORDINATOR["filling"])).app) as port:
            told = later.enter_context(events(port))
            next(told)
        assert [one["event"] for one in told][:2] == ["status", "learned"]


def test_a_silent_server_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "SILENCE", 0.0)
    with serving(Stage("coordinator.html").app) as port, events(port) as told:
        assert next(told)["retry"]
        assert next(told) == {"event": "alive", "data": "{}"}


def test_a_failure_is_told_and_logged_once_and_passes(caplog: pytest.LogCaptureFixture) -> None:
    """However many pages look and however long it lasts; nothing of the failure but its kind leaves the server."""
    stage = Stage("coordinator.html", {"status": {"started": np.float64(1.0)}})
    with serving(stage.app) as port, events(port) as told, events(port) as others:
        for one in (told, others):
            assert next(one)["retry"]
            failed = next(one)
            assert failed["event"] == "failed"
            assert "(TypeError); the server's log says more" in json.loads(failed["data"])["detail"]
            assert "numpy" not in failed["data"]
        stage.parts = {"status": {"started": 2.0}}
        assert [json.loads(next(one)["data"]) for one in (told, others)] == [{"started": 2.0}] * 2
        stage.parts = {"status": {"started": np.float64(1.0)}}
        assert next(told)["event"] == "failed"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("ERROR", "page failed")] * 2
    assert all(record.exc_info for record in caplog.records)


def test_watching_does_not_take_the_place_of_working(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MAX_WATCHERS", 1)
    with serving(Stage("coordinator.html").app) as port, events(port) as told:
        next(told)
        assert httpx2.get(f"http://127.0.0.1:{port}/v1/events", trust_env=False).status_code == 503
        assert httpx2.get(f"http://127.0.0.1:{port}/", trust_env=False).status_code == 200


@pytest.mark.parametrize("name", [name for name, _ in LEARNERS if name != "contextual-bandit"])  # it does not swim
def test_batches_are_never_too_small_to_be_mixed(name: str) -> None:
    """Of runs whose learner was told nothing, and of the demonstration; a shuffler would refuse them for ever."""
    mdp = riverswim(np.random.default_rng(0))
    for users in (30, 31, 61, 100, 329, 331, 1000):
        setting = Demo(users, "riverswim", name, 3.0, 0)
        demonstrated = tomllib.loads(setting.learner_parameters)["learner_parameters"]
        default = CoordinatorConfig(episodes=users, epsilon=3.0, environment="riverswim", learner=name).run
        for least, parameters in ((30, demonstrated), (100, default.learner_parameters)):
            learner = learners.make(name, mdp.problem(users), 0, **parameters)
            history = learn(learner, CountPopulation(mdp, 0), NoPrivacy())
            assert history.users.min() >= min(least, users)


def test_a_learner_of_ones_own_can_be_demonstrated() -> None:
    """It is told nothing, unless it says how it is sized."""
    own = Demo(30, "riverswim", "tests.test_registry:Guess", 3.0, 0)
    assert tomllib.loads(own.learner_parameters) == {"learner_parameters": {}}


def test_a_learner_that_cannot_be_demonstrated_is_refused_before_anything_starts() -> None:
    with (
        pytest.raises(UnknownNameError, match="Did you mean 'optimistic'"),
        demo.learned(Demo(30, "x", "optimist", 1, 0)),
    ):
        pass
    with pytest.raises(InvalidInputError, match="vectors of 4 numbers; use the learner policy-search"):
        demo.chosen(None, "CartPole-v1", "optimistic", epsilon=1.0, seed=0)


def test_the_environment_chooses_what_is_not_chosen() -> None:
    boxes, tables = (demo.chosen(None, env, None, epsilon=1.0, seed=0) for env in ("CartPole-v1", "spectrum"))
    assert (boxes.learner, boxes.users) == ("policy-search", demo.RETURN_USERS)
    assert (tables.learner, tables.users) == ("optimistic", demo.TABLE_USERS)
    assert demo.chosen(40, "spectrum", "ucbvi", epsilon=1.0, seed=0).users == 40


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdp-pe", "optimistic", "ucbvi"])
def test_what_is_told_of_a_run(tmp_path: Path, name: str) -> None:
    """By replaying the releases; it survives a restart, and what a learner does not know is not told."""
    parameters = {"sdp-pe": {"first": 2}, "optimistic": {"first": 10}, "ucbvi": {"batch": 20}}[name]
    run = Run(MDP.problem(90), name, Budget(8.0, 1e-5), 7, parameters, noise="users")
    coordinator = Coordinator(tmp_path, run)
    try:
        nothing = learned(coordinator)
        assert (nothing["batches"], nothing["history"], nothing["estimate"]) == (0, [], None)
        assert nothing["changed_actions"] is None
        replayed, expected, switches, before = run.make_learner(), [], 0, None
        while coordinator.pending is not None:
            coordinator.absorb(answer(coordinator)[0])
            batch = replayed.next_batch()
            assert batch is not None
            switches += before is not None and before != batch.mixture
            before = batch.mixture
            replayed.observe(coordinator.last_record.release)
            replayed.next_batch()
            expected.append(replayed.view().estimate)
        told = learned(coordinator)
        served = {
            "learned": told,
            "outcomes": coordinator.store.outcomes,
            "certificate": coordinator.certificate().as_dict(),
        }
        assert msgspec.json.decode(msgspec.json.encode(served)) == json.loads(json.dumps(served, allow_nan=False))
    finally:
        coordinator.close()
    assert told["batches"] == len(expected) > 1
    assert [point["value"] for point in told["history"]] == [one.value for one in expected if one is not None]
    last = expected[-1]
    assert told["estimate"] == (None if last is None else asdict(last))
    if name != "sdp-pe":  # whether that one knows anything after so few users is up to the noise
        assert (last is None) == (name == "ucbvi")
    assert told["switches"] == switches
    assert told["changed_actions"] == 0  # nothing is played after the last
    assert (told["log2_policies"] is None) == (told["stages"] is None) == (name != "sdp-pe")
    assert (len(told["policy"]["action"]), len(told["policy"]["action"][0])) == (2, 2)
    again = Coordinator(tmp_path, run)
    assert learned(again) == told
    again.close()


@pytest.mark.slow
def test_long_histories_and_wide_policies_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shufflerl.network.coordinator import dashboard

    monkeypatch.setattr(dashboard, "MAX_POINTS", 2)
    monkeypatch.setattr(dashboard, "MAX_STATES", 1)
    run = Run(MDP.problem(120), "optimistic", Budget(8.0, 1e-5), 7, {"first": 10}, noise="users")
    coordinator = Coordinator(tmp_path, run)
    while coordinator.pending is not None:
        coordinator.absorb(answer(coordinator)[0])
    told = learned(coordinator)
    assert told["batches"] >= 3
    assert len(told["history"]) <= 2
    assert told["history"][-1]["batch"] == told["batches"] - 1
    assert told["policy"]["states"] == 2
    assert {len(row) for row in told["policy"]["action"]} == {1}
    coordinator.close()


def test_the_shuffler_shows_states_and_sums_only(tmp_path: Path) -> None:
    world = World(noise_mean=40.0)
    world.announce()
    server = ShufflerServer(world.shuffler, world.store)
    with serving(server.app) as port, httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        report = world.report()
        client.post(reports_path(world), content=upload_of(report, report))
        with events(port) as told:
            next(told)
            data = next(told)["data"]
        assert "shuffler" in client.get("/").text
    seen: dict[str, Any] = json.loads(data)
    assert (seen["accepted"], seen["refused"]) == (1, {"duplicate": 1})
    assert [(one["state"], one["accepted"], one["users"]) for one in seen["batches"]] == [("open", 1, 3)]
    assert seen["release_seconds"] is None
    for secret in (world.task.hex(), report.report_id.hex(), "127.0.0.1"):
        assert secret not in data


def test_the_coordinator_is_not_told_what_was_refused(tmp_path: Path) -> None:
    """All it has from the shuffler is the batch's status; refusals are for the shuffler's own page."""
    server = CoordinatorServer(lambda: Coordinator(tmp_path, RUN), "http://127.0.0.1:9", poll=5.0)
    told = json.dumps(asyncio.run(server.look()))
    assert "refused" not in told
    server.owner.submit(server.coordinator.close).result()
