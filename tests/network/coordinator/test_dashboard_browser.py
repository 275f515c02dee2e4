"""The pages in a real browser: every state of theirs, both schemes, a phone, a keyboard, a server that is killed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from shufflerl.learners import LEARNERS
from tests.network.web.test_http import serving
from tests.support.dashboard_states import COORDINATOR, SHUFFLER, Stage, browser, status
from tests.support.network_processes import Crowd, processes
from tests.support.waiting import PATIENCE, telling, until

STATES = [("coordinator.html", name) for name in COORDINATOR] + [("shuffler.html", name) for name in SHUFFLER]

#: Each an expression to evaluate in a page; what it finds wrong.
CHECKS = (Path(__file__).parents[2] / "support" / "page_checks.js").read_text()
LOW_CONTRAST, STUMBLES, EMPTY = (
    f"() => {{ {CHECKS}; return {name}(); }}" for name in ("lowContrast", "stumbles", "empty")
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        expect.set_options(timeout=1000 * PATIENCE)
        yield started


class Visit:
    """A page with what went wrong on it and what it asked for."""

    def __init__(self, page: Page, port: int) -> None:
        self.page, self.port = page, port
        self.errors: list[str] = []
        self.asked: list[str] = []
        page.set_default_timeout(1000 * PATIENCE)
        page.on("console", lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    def open(self) -> None:
        self.page.goto(f"http://127.0.0.1:{self.port}/")
        expect(self.page.locator("#link")).to_have_attribute("data-link", "live")

    def check(self) -> None:
        assert self.errors == []
        assert {urlsplit(url).netloc for url in self.asked} == {f"127.0.0.1:{self.port}"}


@contextmanager
def visit(chromium: Browser, port: int, **options: Any) -> Iterator[Visit]:
    context = chromium.new_context(reduced_motion="reduce", **options)
    try:
        yield Visit(context.new_page(), port)
    finally:
        context.close()


@pytest.mark.parametrize(("page", "name"), STATES)
def test_every_state_can_be_read_by_everyone(chromium: Browser, page: str, name: str) -> None:
    parts = (COORDINATOR if page == "coordinator.html" else SHUFFLER)[name]
    with serving(Stage(page, parts).app) as port, visit(chromium, port) as seen:
        sizes: list[int] = []
        seen.page.on("response", lambda answer: sizes.append(int(answer.headers.get("content-length", 0))))
        seen.open()
        expect(seen.page.locator("#headline")).not_to_contain_text("Waiting for the " + page.split(".", maxsplit=1)[0])
        if name not in ("idle", "waiting"):
            seen.page.wait_for_function("document.querySelectorAll('td').length > 0")
        for width in (1280, 360):
            seen.page.set_viewport_size({"width": width, "height": 800})
            assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
            for scheme in ("light", "dark"):
                seen.page.emulate_media(color_scheme=scheme)
                assert seen.page.evaluate(LOW_CONTRAST) == []
        assert seen.page.evaluate(STUMBLES) == []
        assert seen.page.evaluate("document.getAnimations().length") == 0
        assert 10_000 < sum(sizes) < 200_000
        seen.check()


def test_what_is_not_known_is_not_shown_as_zero(chromium: Browser) -> None:
    with serving(Stage("coordinator.html", COORDINATOR["waiting"]).app) as port, visit(chromium, port) as seen:
        seen.open()
        page = seen.page
        expect(page.locator("#headline")).to_have_text("Waiting for the first users")
        expect(page.locator("#value")).to_have_text("–")
        expect(page.locator("#interval")).to_have_text("not known yet")
        expect(page.locator("#messages dd").nth(2)).to_have_text("– not known yet")
        expect(page.locator("#learning dd").last).to_have_text("– not known yet")
        expect(page.locator("#chart title")).to_have_text("No value is estimated yet")
    with serving(Stage("coordinator.html", COORDINATOR["unheard"]).app) as port, visit(chromium, port) as seen:
        seen.open()
        expect(seen.page.locator("#batch-accepted")).to_have_text("–")
        expect(seen.page.locator("#batch-bar")).not_to_have_attribute("aria-valuenow", "0")


def test_the_page_says_what_it_was_told(chromium: Browser) -> None:
    with serving(Stage("coordinator.html", COORDINATOR["eliminating"]).app) as port, visit(chromium, port) as seen:
        seen.open()
        page, told = seen.page, COORDINATOR["eliminating"]["learned"]
        expect(page.locator("#batch-accepted")).to_have_text("812")
        expect(page.locator("#batch-bar")).to_have_attribute("aria-valuenow", "67")
        expect(page.locator("#batch-steps [aria-current]")).to_have_text("Open")
        expect(page.locator("#gauge")).to_have_attribute("aria-valuetext", "epsilon 3 of 3 spent")
        expect(page.locator("#value")).to_have_text(f"{told['estimate']['value']:.3g}")
        expect(page.locator("#value-rows tr")).to_have_count(6)
        expect(page.locator("#learning")).to_contain_text("at most 16")
        expect(page.locator("#learning")).to_contain_text("Stages doneof 96")
        expect(page.locator("#policy tbody td")).to_have_count(48)
        share = round(100 * told["policy"]["share"][0][0])
        expect(page.locator("#policy tbody td").first).to_have_text(f"{told['policy']['action'][0][0]}{share}%")
        expect(page.locator("#messages")).to_contain_text("at most 310 ms")
        assert page.locator("#shuffler-page").get_attribute("href") == "http://127.0.0.1:8742/"


def test_changes_come_by_themselves_and_are_said_once(chromium: Browser) -> None:
    stage = Stage("coordinator.html", dict(COORDINATOR["filling"]))
    with serving(stage.app) as port, visit(chromium, port) as seen:
        seen.open()
        expect(seen.page.locator("#said")).to_have_text("Batch 6 is filling")
        stage.parts["status"] = status(why="<img src=x onerror=alert(1)> & another second")
        expect(seen.page.locator("#why")).to_have_text("<img src=x onerror=alert(1)> & another second")
        stage.parts |= COORDINATOR["finished"]
        expect(seen.page.locator("#said")).to_have_text("Finished")
        expect(seen.page.locator("#policy-title")).to_have_text("Learned policy")
        assert seen.asked.count(f"http://127.0.0.1:{port}/") == 1
        seen.check()


def test_no_epsilon_is_shown_below_what_was_spent(chromium: Browser) -> None:
    expected = {1.00001: "1.01", 0.12341: "0.124", 0.5: "0.5", 0.9991: "1", 12.34: "12.4", 1.2e-9: "1.2e-9", 0: "0"}
    stage = Stage("coordinator.html", COORDINATOR["filling"] | {"status": status(epsilon_spent=1.00001)})
    with serving(stage.app) as port, visit(chromium, port) as seen:
        seen.open()
        expect(seen.page.locator("#epsilon")).to_have_text("1.01")
        text = "async all => { const { atMost } = await import('./pages/common.js'); return all.map(atMost); }"
        assert seen.page.evaluate(text, list(expected)) == list(expected.values())
        seen.check()


def test_everything_is_reached_by_keyboard(chromium: Browser) -> None:
    with serving(Stage("coordinator.html", COORDINATOR["filling"]).app) as port, visit(chromium, port) as seen:
        seen.open()
        page = seen.page
        expect(page.locator("#value-details")).to_be_visible()
        reached = []
        for _ in range(10):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("(e => e.id || e.className || e.textContent)(document.activeElement)"))
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", reached
        expected = ["skip", "certificate-open", "by-batch", "The same as a table", "scroll", "shuffler-page"]
        assert reached[:6] == expected
        assert reached[6:10] == ["Status", "Policy", "Metrics", "Interface"]
        page.locator("#certificate-open").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#certificate-claim")).to_have_text("(3, 1e-5)-differential privacy in the shuffle model")
        expect(page.locator("#certificate-assumptions dt").first).to_have_text("unique users")
        assert page.evaluate(STUMBLES) == []
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(LOW_CONTRAST) == []
        page.keyboard.press("Escape")
        expect(page.locator("#certificate")).not_to_be_visible()
        assert page.evaluate("document.activeElement.id") == "certificate-open"
        seen.check()


def test_a_page_that_is_sent_away_comes_back(chromium: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that is no stream ends what the browser does by itself; the page tries on."""
    from shufflerl.network.web import watching

    monkeypatch.setattr(watching, "MAX_WATCHERS", 0)
    with serving(Stage("shuffler.html", SHUFFLER["taking"]).app) as port, visit(chromium, port) as seen:
        seen.page.goto(f"http://127.0.0.1:{port}/")
        expect(seen.page.locator("#link")).to_have_attribute("data-link", "lost")
        monkeypatch.setattr(watching, "MAX_WATCHERS", 32)
        expect(seen.page.locator("#link")).to_have_attribute("data-link", "live")
        assert all("503" in error for error in seen.errors)


def test_a_page_that_cannot_be_kept_fresh_says_so(chromium: Browser) -> None:
    stage = Stage("coordinator.html", dict(COORDINATOR["filling"]))
    with serving(stage.app) as port, visit(chromium, port) as seen:
        seen.open()
        told = stage.parts["status"]
        stage.parts["status"] = {"value": np.float64(1.0)}
        expect(seen.page.locator("#link")).to_have_attribute("data-link", "failed")
        expect(seen.page.locator("#link-text")).to_contain_text("cannot be kept fresh (TypeError)")
        for scheme in ("light", "dark"):
            seen.page.emulate_media(color_scheme=scheme)
            assert seen.page.evaluate(LOW_CONTRAST) == []
        stage.parts["status"] = told
        expect(seen.page.locator("#link")).to_have_attribute("data-link", "live")
        seen.check()


@pytest.mark.parametrize(
    ("env", "learner"),
    [
        *(("spectrum-tiles" if name == "contextual-bandit" else "spectrum", name) for name, _ in LEARNERS),
        ("CartPole-v1", "policy-search"),
    ],
)
def test_what_make_demo_runs_is_watched_to_its_end(chromium: Browser, tmp_path: Path, env: str, learner: str) -> None:
    """The command as it is, but for the learner and as few users and as little noise as it takes.

    No page, log or panel has a fault.
    """
    command = [sys.executable, "-m", "shufflerl", "demo", "--keep", "--json", "--folder", str(tmp_path)]
    # In two batches or more of each kind: a page is watched while it is learned from the first.
    users = {("spectrum", "optimistic"): "60", ("CartPole-v1", "policy-search"): "120"}.get((env, learner), "30")
    demo = subprocess.Popen(
        [*command, "--env", env, "--learner", learner, "--users", users, "--epsilon", "8"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with telling(tmp_path):
            assert demo.stdout is not None
            assert demo.stderr is not None
            assert demo.stderr.readline().startswith("Starting")
            said = demo.stderr.readline()
            ports = [int(port) for port in re.findall(r"http://127\.0\.0\.1:(\d+)/", said)]
            assert len(ports) == 2, said
            with visit(chromium, ports[0]) as seen, visit(chromium, ports[1]) as other:
                seen.open()
                other.open()
                figures = json.loads(demo.stdout.readline())
                check_the_end(seen, other, figures)
            demo.send_signal(signal.SIGINT)
            assert demo.communicate(timeout=PATIENCE) == ("", "The pages stay open; Ctrl-C ends them.\n")
            assert demo.returncode == 0
    finally:
        demo.kill()
        demo.communicate()
    assert complaints(tmp_path) == []


def check_the_end(seen: Visit, other: Visit, figures: dict[str, Any]) -> None:
    """Both pages of a run that is over, in full."""
    page, batches = seen.page, len(figures["batches"])
    expect(page.locator("#headline")).to_have_text("Finished")
    expect(page.locator("#batch-accepted")).to_have_text(str(batches))
    expect(page.locator("#run-bar")).to_have_attribute("aria-valuenow", "100")
    expect(page.locator("#learning dd").first).to_have_text(str(batches))
    expect(page.locator("#learning")).to_contain_text(re.compile(r"at most \d+"))
    expect(page.locator("#epsilon")).to_have_text("8")
    if figures["learner"] == "optimistic":
        expect(page.locator("#value-rows tr")).to_have_count(batches)
        expect(page.locator("#value-note")).to_contain_text("Of the policies played last")
    if figures["environment"] == "CartPole-v1":
        expect(page.locator("#value-title")).to_have_text("Estimated return of an episode")
        expect(page.locator("#value-rows tr").last.locator("td").first).to_have_text(str(figures["users"]))
        dots = page.locator("#chart .arm").count()
        page.locator("#chart-by [value=users]").check()
        expect(page.locator("#chart")).to_contain_text(f"{figures['users']} users")
        assert page.locator("#chart .arm").count() == dots > 0
        expect(page.locator("#policy-note")).to_contain_text("linear polic")
        expect(page.locator("#policy tbody td")).to_have_count(5)
    page.locator("#certificate-open").click()
    expect(page.locator("#certificate-claim")).to_contain_text("differential privacy in the shuffle model")
    expect(other.page.locator("#headline")).to_have_text("No batch is open")
    expect(other.page.locator("#work dd").first).to_have_text(str(figures["users"]))
    for one in (seen, other):
        assert one.page.evaluate(EMPTY) == []
        for link in one.page.locator("footer a").all():
            answer = one.page.request.get(f"http://127.0.0.1:{one.port}/{link.get_attribute('href')}")
            assert answer.ok, link
        one.check()


def complaints(folder: Path) -> list[str]:
    """What went wrong by the logs of all roles."""
    logs = sorted(folder.glob("*.log"))
    assert [log.stem for log in logs] == ["coordinator", "node", "shuffler"]
    bad = re.compile(r'Traceback|Error|Warning|^shufflerl: |"trouble"|"level": "(?!info)')
    lines = ((log.stem, line) for log in logs for line in log.read_text().splitlines())
    return [f"{name}: {line}" for name, line in lines if bad.search(line) and "a new one is made" not in line]


def test_a_run_is_watched_through_a_killed_coordinator(chromium: Browser, tmp_path: Path) -> None:
    with processes(tmp_path, episodes=70) as system:
        system.start("shuffler")
        crowd = Crowd(system, bytes.fromhex(system.start("coordinator")["task"]))
        with visit(chromium, system.ports["coordinator"]) as seen, visit(chromium, system.ports["shuffler"]) as other:
            seen.open()
            other.open()
            expect(seen.page.locator("#headline")).to_have_text("Waiting for the first users")
            expect(seen.page.locator("#epsilon")).to_have_text("0")
            expect(other.page.locator("#headline")).to_have_text("Taking reports")
            until(lambda: crowd.step() and system.ask("/v1/status")["batches_learned"] >= 2)
            expect(seen.page.locator("#epsilon")).not_to_have_text("0")
            expect(seen.page.locator("#batch-title")).not_to_have_text("Batch 0")
            seen.check()

            system.kill("coordinator")
            expect(seen.page.locator("#link")).to_have_attribute("data-link", "lost")
            expect(seen.page.locator("#said")).to_contain_text("connection is lost")
            system.start("coordinator")
            expect(seen.page.locator("#link")).to_have_attribute("data-link", "live")
            assert all("ERR_CONNECTION_REFUSED" in error or "ERR_INCOMPLETE" in error for error in seen.errors)
            seen.errors.clear()

            until(lambda: crowd.step() and system.ask("/v1/status")["finished"])
            expect(seen.page.locator("#headline")).to_have_text("Finished")
            batches = len(system.ask("/v1/batches")["batches"])
            expect(seen.page.locator("#batch-accepted")).to_have_text(str(batches))
            expect(other.page.locator("#work dd").first).to_have_text(str(70))
            assert seen.asked.count(f"http://127.0.0.1:{seen.port}/") == 1
            seen.check()
            other.check()
