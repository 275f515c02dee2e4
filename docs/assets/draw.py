"""Draws the pictures of the documentation: `python docs/assets/draw.py` writes them into docs/images.

Colours are names that the page they are in gives values, light or dark; by themselves they follow the reader's system.
"""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent.parent / "images"
LIGHT = (
    "--ink:#1d2a33;--soft:#5b6770;--card:#ffffff;--back:#f6f5f1;"
    "--user:#0072b2;--noise:#c04e00;--mix:#00795a;--learn:#6a3d9a"
)
DARK = (
    "--ink:#e6e9ec;--soft:#a3adb5;--card:#23282e;--back:#181c20;"
    "--user:#6cb8ea;--noise:#ff9d5c;--mix:#3fd0a4;--learn:#c3a1ec"
)
STYLE = f"""<style>.fig{{{LIGHT};font-family:Helvetica,Arial,sans-serif}}
@media (prefers-color-scheme:dark){{.fig{{{DARK}}}}}</style>"""


class Picture:
    """An SVG that grows by boxes, arrows and words."""

    def __init__(self, name: str, width: int, height: int, title: str, description: str) -> None:
        self.name = name
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="fig" viewBox="0 0 {width} {height}" role="img" '
            f'aria-labelledby="{name}-t {name}-d">',
            f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(description)}</desc>',
            STYLE,
            f'<defs><marker id="{name}-a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0L10 5L0 10z" fill="var(--soft)"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="14" fill="var(--back)"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, colour: str, *, dashed: bool = False) -> None:
        """A card."""
        dash = ' stroke-dasharray="6 5"' if dashed else ""
        fill = "none" if dashed else "var(--card)"
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="10" fill="{fill}" '
            f'stroke="var(--{colour})" stroke-width="2"{dash}/>'
        )

    def words(
        self,
        x: float,
        y: float,
        text: str,
        *,
        colour: str = "ink",
        size: int = 14,
        bold: bool = False,
        at: str = "middle",
    ) -> None:
        """A line of text."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}"{weight} text-anchor="{at}" fill="var(--{colour})">'
            f"{escape(text)}</text>"
        )

    def card(self, x: float, y: float, width: float, colour: str, title: str, *lines: str) -> None:
        """A box with a title and lines."""
        self.box(x, y, width, 36 + 20 * len(lines), colour)
        self.words(x + width / 2, y + 24, title, colour=colour, size=15, bold=True)
        for i, line in enumerate(lines):
            self.words(x + width / 2, y + 46 + 20 * i, line, size=13)

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line with a head at its end."""
        path = " ".join(f"{'ML'[i > 0]}{x:g} {y:g}" for i, (x, y) in enumerate(points))
        self._parts.append(
            f'<path d="{path}" fill="none" stroke="var(--soft)" stroke-width="2" marker-end="url(#{self.name}-a)"/>'
        )

    def line(self, points: list[tuple[float, float]], colour: str, *, filled: bool = False) -> None:
        """A curve."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        look = f'fill="var(--{colour})" fill-opacity="0.18"' if filled else 'fill="none"'
        self._parts.append(f'<polyline points="{path}" {look} stroke="var(--{colour})" stroke-width="2"/>')

    @property
    def text(self) -> str:
        """The picture as a file."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def trust() -> Picture:
    """Three models of trust, side by side."""
    p = Picture(
        "trust",
        920,
        360,
        "Three models of trust",
        "Central: users send their episodes in clear to a server that adds noise. Shuffle: users add a little noise, a "
        "shuffler mixes, the coordinator sees noisy sums. Local: every user adds all the noise itself.",
    )
    columns = [
        (20, "noise", "central", "trust one server with everything", "noise on a count: sd 17.5"),
        (320, "mix", "shuffle", "trust that two do not collude", "noise on a count: sd 17.5"),
        (620, "user", "local", "trust nobody", "noise on a count: sd 17.5 · √n"),
    ]
    for x, colour, name, trusted, noise in columns:
        p.box(x, 16, 280, 328, colour, dashed=True)
        p.words(x + 140, 42, name, colour=colour, size=18, bold=True)
        p.words(x + 140, 64, trusted, size=13, colour="soft")
        p.words(x + 140, 330, noise, size=13, colour="ink")
    for x, label in ((20, "episode"), (320, "tags + a little noise"), (620, "report + all its noise")):
        for i in range(3):
            p.box(x + 22 + 82 * i, 84, 72, 40, "user")
            p.words(x + 58 + 82 * i, 109, ("user 1", "user 2", "user n")[i], size=13)
        p.words(x + 140, 148, label, size=13, colour="soft")
    for x, end in ((20, 222), (320, 172), (620, 222)):
        for i in range(3):
            p.arrow((x + 58 + 82 * i, 154), (x + 140 + 30 * (i - 1), end))
    p.box(360, 174, 200, 40, "mix")
    p.words(460, 199, "shuffler mixes a batch", size=14)
    p.arrow((460, 216), (460, 240))
    p.card(60, 226, 200, "noise", "server", "sees every episode,", "adds the noise")
    p.card(360, 244, 200, "learn", "coordinator", "sees noisy sums")
    p.card(660, 226, 200, "learn", "server", "sees noisy reports,", "nothing in clear")
    return p


def sees() -> Picture:
    """What each party sees of one report."""
    p = Picture(
        "sees",
        920,
        300,
        "What each party sees",
        "The node sees its own episode. The shuffler sees who sent a sealed envelope, and when. The coordinator "
        "sees all tags of a batch in random order, without origin.",
    )
    p.card(24, 30, 250, "user", "a node", "its own episode", "7 · 31 · 40  (true tags)", "12 · 3  (noise)")
    p.card(334, 30, 250, "mix", "the shuffler", "who sent it, and when", "▒▒▒ ▒▒▒ ▒▒▒ ▒▒▒ ▒▒▒", "not one tag in clear")
    p.card(
        644,
        30,
        250,
        "learn",
        "the coordinator",
        "tags of the whole batch",
        "3 · 40 · 7 · 12 · 44 · 31 · 9 …",
        "not one origin",
    )
    p.arrow((278, 78), (330, 78))
    p.arrow((588, 78), (640, 78))
    p.words(
        459,
        168,
        "Each tag is sealed to the coordinator by itself; all tags of a report are sealed once more to the shuffler.",
        size=13,
    )
    p.box(24, 190, 870, 86, "noise", dashed=True)
    p.words(459, 216, "If shuffler and coordinator put together what they have", colour="noise", size=15, bold=True)
    p.words(
        459,
        240,
        "they know which tags came from whom. What is left is each user's own noise: one part in n of the batch's.",
        size=13,
    )
    p.words(
        459, 260, "That is why different hands must run them, on different machines, with different backups.", size=13
    )
    return p


def _poisson(mean: float, k: int) -> float:
    return math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) if k >= 0 else 0.0


def epsilon() -> Picture:
    """The law of one counter with one user and with another in its place."""
    mean = 40.0
    p = Picture(
        "epsilon",
        920,
        330,
        "What epsilon bounds",
        "Two overlapping bell curves: the law of a counter's noisy value with one user and with another in its place. "
        "Their ratio is close to one nearly everywhere; delta is the excess in the tails where it is not.",
    )
    for shift, colour in ((0, "learn"), (1, "user")):
        points = [(60 + 10 * k, 262 - 3100 * _poisson(mean, k - shift)) for k in range(8, 81)]
        p.line([(140, 262), *points, (860, 262)], colour, filled=True)
    p.arrow((60, 262), (880, 262))
    p.words(870, 284, "number of messages that name this counter", size=13, colour="soft", at="end")
    p.words(130, 44, "with another in your place", colour="learn", size=15, bold=True, at="start")
    p.words(130, 66, "with you", colour="user", size=15, bold=True, at="start")
    p.words(680, 60, "Whatever number is seen: how much likelier", size=14)
    p.words(680, 80, "is it with you than with another, or the reverse?", size=14)
    p.words(680, 104, "At most e^ε times: that is epsilon.", size=14, bold=True)
    p.arrow((772, 226), (812, 250))
    p.words(760, 200, "out here the ratio is larger:", size=13)
    p.words(760, 218, "delta is the excess, added up", size=13)
    p.words(
        60,
        312,
        "Poisson noise of mean 40 on one counter, drawn exactly. A real release has 22 changed counters and mean 307.",
        size=13,
        colour="soft",
        at="start",
    )
    return p


def batch() -> Picture:
    """How a batch flows between the roles."""
    p = Picture(
        "batch",
        920,
        480,
        "How a batch flows",
        "The coordinator announces, the shuffler opens, nodes check, play, randomize and report; the shuffler seals, "
        "permutes and releases; the coordinator charges the ledger, opens, learns and scrubs.",
    )
    lanes = ((150, "user", "nodes"), (460, "mix", "shuffler"), (770, "learn", "coordinator"))
    for x, colour, name in lanes:
        p.words(x, 34, name, colour=colour, size=17, bold=True)
        p.line([(x, 46), (x, 462)], colour)

    def said(y: float, start: int, end: int, text: str) -> None:
        a, b = lanes[start][0], lanes[end][0]
        p.arrow((a, y), (b - math.copysign(4, b - a), y))
        p.words((a + b) / 2, y - 7, text, size=13)

    def done(y: float, lane: int, *lines: str) -> None:
        x, colour, _ = lanes[lane]
        p.box(x - 125, y, 250, 12 + 18 * len(lines), colour)
        for i, line in enumerate(lines):
            p.words(x, y + 20 + 18 * i, line, size=13)

    done(56, 2, "learner plans; announcement signed")
    said(112, 2, 1, "policy mixture, counters, n, noise, key")
    said(140, 1, 0, "the same, and the shuffler's own key")
    done(152, 0, "check the noise; charge my ledger", "play · add noise · seal · store")
    said(222, 0, 1, "sealed report, the same bytes until a verdict")
    done(234, 1, "n-th valid report: sealed, for good", "permute all tags; delete reports and key")
    said(306, 1, 2, "all tags of the batch, in random order")
    done(318, 2, "charge the ledger, then open and count", "subtract the mean noise; learn")
    said(392, 2, 1, "scrub")
    done(404, 1, "release deleted; only spent ids remain")
    return p


def sums() -> Picture:
    """A masked sum of two users, in numbers."""
    p = Picture(
        "sums",
        920,
        300,
        "A masked sum of two users",
        "Each user adds a mask to its counts and sends the result, and the seed of the mask sealed to the coordinator. "
        "The shuffler adds up what was sent and permutes the seeds. The coordinator subtracts the masks from the sum.",
    )
    users = (("user 1", "0 1 0 2", "9 4 7 1", "9 5 7 3"), ("user 2", "1 0 0 1", "3 8 6 5", "4 8 6 6"))
    for top, (name, counts, mask, sent) in zip((20, 140), users, strict=True):
        p.box(24, top, 250, 104, "user")
        p.words(149, top + 23, name, colour="user", size=15, bold=True)
        lines = (("counts, with noise", counts, "user"), ("mask, from a seed", mask, "noise"), ("sent", sent, "ink"))
        for i, (what, numbers, colour) in enumerate(lines):
            p.words(40, top + 47 + 22 * i, what, size=13, at="start")
            p.words(258, top + 47 + 22 * i, numbers, colour=colour, size=15, at="end")
        p.arrow((278, top + 84), (366, 116 if top == 20 else 156))
    p.card(370, 74, 200, "mix", "shuffler", "adds what was sent:", "3 3 3 9", "permutes sealed seeds")
    p.card(670, 62, 226, "learn", "coordinator", "masks of all seeds:", "2 2 3 6", "3 3 3 9 less 2 2 3 6", "= 1 1 0 3")
    p.arrow((574, 100), (666, 100))
    p.words(620, 92, "seeds", size=13, colour="soft")
    p.arrow((574, 146), (666, 146))
    p.words(620, 138, "one sum", size=13, colour="soft")
    p.words(
        460,
        280,
        "Digits modulo 10 here, modulo 2^16 or 2^32 in earnest. What was sent is random to all who lack the seed.",
        size=13,
        colour="soft",
    )
    return p


def zones() -> Picture:
    """Which containers share a network."""
    p = Picture(
        "zones",
        920,
        330,
        "Networks of a deployment",
        "Nodes reach the front ends of the shuffler. The coordinator reaches them too. The broker is on the shuffler's "
        "own network, where the coordinator is not.",
    )
    p.box(250, 20, 400, 290, "mix", dashed=True)
    p.words(450, 44, "the shuffler's operator", colour="mix", size=15, bold=True)
    p.box(690, 20, 210, 290, "learn", dashed=True)
    p.words(795, 44, "the coordinator's operator", colour="learn", size=15, bold=True)
    p.card(20, 120, 170, "user", "nodes", "one per user", "keys pinned")
    p.card(280, 70, 150, "mix", "front end 1", "takes reports")
    p.card(280, 190, 150, "mix", "front end 2", "takes reports")
    p.card(480, 90, 150, "mix", "broker", "three servers,", "most of them have", "every write")
    p.card(710, 110, 170, "learn", "coordinator", "ledger, learner,", "its own disk")
    p.arrow((192, 150), (276, 105))
    p.arrow((192, 166), (276, 210))
    p.arrow((432, 100), (476, 120))
    p.arrow((432, 215), (476, 165))
    p.arrow((708, 180), (668, 222), (434, 222))
    p.words(450, 290, "HTTP only: no shared disk, no shared broker", size=13, colour="soft")
    return p


PICTURES = (trust, sees, epsilon, batch, sums, zones)

if __name__ == "__main__":
    for draw in PICTURES:
        picture = draw()
        (IMAGES / f"{picture.name}.svg").write_text(picture.text)
