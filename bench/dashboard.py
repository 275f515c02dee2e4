"""The coordinator's page beside what it must reach: how much it loads, and how soon there is something to see."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import httpx2

from bench.measure import Figure, SkippedError, medians
from shufflerl.network.demo import Demo, system

LOADS = 7
FIRST_PAINT = """new Promise((seen) => new PerformanceObserver((list) => {
  const first = list.getEntriesByName("first-contentful-paint")[0];
  if (first) seen(first.startTime);
}).observe({ type: "paint", buffered: true }))"""


def run() -> list[Figure]:
    """First paint and weight of the coordinator's page while a demonstration learns, in Chromium, nothing cached."""
    where = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
    )
    if not where:
        raise SkippedError("There is no Chromium here; get it with: apt-get install chromium.")
    setting = Demo(users=400, env="riverswim", learner="optimistic", epsilon=8.0, seed=0)
    with tempfile.TemporaryDirectory() as folder, system(setting, Path(folder)) as parts:
        at = parts["coordinator_at"]
        while httpx2.get(f"{at}/v1/status", trust_env=False).json()["batches_learned"] == 0:
            time.sleep(0.1)
        paint, weight = _load(where, at)
        events = _first_events(at)
    return [
        Figure.under(1000, "first paint of the coordinator's page, on loopback", "ms", paint),
        Figure.under(200, "all that it loads, with the first events", "KB", (weight + events) / 1000),
    ]


def _load(where: str, at: str) -> tuple[float, float]:
    """Milliseconds until the first paint, and bytes of files; medians over fresh profiles."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=where, args=options)
        weights: list[int] = []

        def load(_: int) -> float:
            context = browser.new_context()
            page, sizes = context.new_page(), list[int]()
            page.on("response", lambda answer: sizes.append(int(answer.headers.get("content-length", 0))))
            page.goto(f"{at}/")
            page.wait_for_selector("[data-link=live]")
            painted = float(page.evaluate(FIRST_PAINT))
            weights.append(sum(sizes))
            context.close()
            return painted

        (painted,) = medians(LOADS, load)
        browser.close()
    return painted, max(weights)


def _first_events(at: str) -> int:
    """Bytes of the first picture: both parts that are sent at once."""
    size, parts = 0, 0
    with httpx2.stream("GET", f"{at}/v1/events", trust_env=False) as answer:
        for line in answer.iter_lines():
            size += len(line.encode()) + 1
            parts += line.startswith("data")
            if parts == 2:
                break
    return size
