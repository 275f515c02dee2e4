"""The report: one page that needs nothing else, a PNG and an SVG of every figure, and the claims as JSON."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from shufflerl.experiments.claims import OURS, Claim, Verdict
from shufflerl.experiments.figures import overview, style
from shufflerl.experiments.figures.base import Analysis, Evidence, Figure, Size, Table
from shufflerl.experiments.store import make_folder, versions, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

PAGE = "report.html"
SUMMARY = "summary.json"

#: A bootstrap interval of fewer values than this is too narrow, which is said.
FEW_SEEDS = 10
_CAUTION = (
    " This small run has so few seeds that its intervals are too narrow and its verdicts are hints; "
    "the full one has 20."
)
FIGURES = "figures"


@dataclass(frozen=True)
class Reproduction:
    """What came of a reproduction: the claims judged, and where the page is."""

    claims: tuple[Claim, ...]
    page: Path


def write_overview(figures: Sequence[Figure], evidence: Evidence, folder: Path) -> Path:
    """Draw and write the picture that the report begins with; it needs no more than the runs of the paper's figures."""
    make_folder(folder / FIGURES)
    panels = [panel for figure in figures for panel in figure.panels]
    with style.styled():
        drawing = overview.draw(panels, evidence)
        for kind in ("svg", "png"):
            write_whole(folder / FIGURES / f"{overview.NAME}.{kind}", _rendered(drawing, kind))
    return folder / FIGURES / f"{overview.NAME}.png"


def write(figures: Sequence[Figure], evidence: Evidence, folder: Path) -> Reproduction:
    """Analyse, draw and write everything, each file whole or not at all; the picture it begins with is there."""
    make_folder(folder / FIGURES)
    sections: list[str] = []
    claims: list[Claim] = []
    for number, figure in enumerate(figures, start=1):
        with style.styled():
            analysis = figure.analyse(evidence)
            files = {kind: _rendered(analysis.drawing, kind) for kind in ("svg", "png")}
        for kind, content in files.items():
            write_whole(folder / FIGURES / f"{figure.name}.{kind}", content)
        sections.append(_section(number, figure, analysis, _inline(files["svg"].decode(), figure.title, figure.name)))
        claims += analysis.claims
    claims.sort(key=lambda claim: claim.place == OURS)  # the paper's come first
    summary = {
        "versions": versions(),
        "size": asdict(evidence.size),
        "claims": [claim.as_dict() for claim in claims],
        "constants": [
            {
                "line": own.line.name,
                "setting": asdict(evidence.setting(own)),
                "chosen": parameters,
                "theory": own.line.theory,
            }
            for own, parameters in evidence.chosen.items()
        ],
    }
    write_whole(folder / SUMMARY, (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())
    page = folder / PAGE
    write_whole(page, _page(evidence.size, claims, _lead(figures, evidence, folder), sections).encode())
    return Reproduction(tuple(claims), page)


def _rendered(drawing: Drawing, kind: str) -> bytes:
    """The figure as a file of that kind; where things go is worked out the first time."""
    sink = io.BytesIO()
    drawing.savefig(sink, format=kind, dpi=150, facecolor="white", metadata={"Date": None} if kind == "svg" else None)
    drawing.set_layout_engine("none")
    return sink.getvalue()


def _inline(svg: str, title: str, name: str) -> str:
    """As part of the page: without its preamble and background, its ink in the colour of the page's text.

    Names in it get the figure's before them: the page has several figures, and browsers take the first of each name.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace("fill: #ffffff", "fill: none").replace(style.INK, "currentColor")
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', f'role="img" aria-label="{escape(title)}"', svg, count=1)


def _lead(figures: Sequence[Figure], evidence: Evidence, folder: Path) -> str:
    """The picture, and under it a sentence of what the paper says and one of what came out, panel by panel."""
    panels = [(figure, panel) for figure in figures for panel in figure.panels]
    if not panels:
        return ""
    svg = (folder / FIGURES / f"{overview.NAME}.svg").read_text("utf-8")
    captions = [
        f'<li><a href="#{figure.name}"><b>({letter}) {escape(panel.title)}</b></a> <i>The paper:</i> '
        f"{escape(panel.paper)} <i>Here:</i> {escape(panel.found(evidence))}</li>"
        for letter, (figure, panel) in zip("abcdefgh", panels, strict=False)
    ]
    picture = _inline(svg, "The paper's own figures", overview.NAME)
    return f'<div class="figure lead">{picture}</div>\n<ul class="captions">{"".join(captions)}</ul>'


def _section(number: int, figure: Figure, analysis: Analysis, svg: str) -> str:
    parts = [
        f'<section id="{figure.name}"><h2>{number}. {escape(figure.title)}</h2>',
        f"<p>{escape(analysis.see)}</p>",
        f'<div class="figure">{svg}</div>',
        f'<p class="files"><a href="{FIGURES}/{figure.name}.png">PNG</a> ',
        f'<a href="{FIGURES}/{figure.name}.svg">SVG</a></p>',
    ]
    if analysis.table is not None:
        parts.append(f"<details><summary>The numbers as a table</summary>{_table(analysis.table)}</details>")
    if analysis.certificate:
        parts.append(f"<details><summary>The certificate</summary><pre>{escape(analysis.certificate)}</pre></details>")
    return "\n".join([*parts, "</section>"])


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


#: How a verdict looks, and what the strip says of so many.
_LOOKS = {
    Verdict.HOLDS: ("holds", "hold"),
    Verdict.FROM: ("from", "hold from some K"),
    Verdict.OPEN: ("open", "not settled"),
    Verdict.NOT_HERE: ("not", "do not hold at this K"),
}


def _claims(claims: Sequence[Claim]) -> str:
    """How many hold, as a strip, and each claim as a line that opens to its numbers."""
    counts = Counter(claim.outcome.verdict for claim in claims)
    strip = "".join(
        f'<span class="{look}" style="flex-grow: {counts[verdict]}">{counts[verdict]} {said}</span>'
        for verdict, (look, said) in _LOOKS.items()
        if counts[verdict]
    )
    rows = []
    for claim in claims:
        why = f"<p>{escape(claim.explanation)}</p>" if claim.explanation else ""
        verdict = f'<span class="verdict {_LOOKS[claim.outcome.verdict][0]}">{escape(claim.outcome.short)}</span>'
        rows.append(
            f'<details class="claim"><summary>{verdict} {escape(claim.short)}</summary>'
            f"<p>{escape(claim.statement)} <small>{escape(claim.place)}</small></p>"
            f"<p>{escape(claim.outcome.numbers)}</p>{why}</details>"
        )
    return f'<div class="strip">{strip}</div>\n<div class="claims">{"".join(rows)}</div>'


def _page(size: Size, claims: Sequence[Claim], lead: str, sections: Sequence[str]) -> str:
    template = resources.files(__package__).joinpath("report.html").read_text("utf-8")
    parts = {
        "size": f"{size.name}: K = {size.episodes:,}, {size.seeds} seeds",
        "caution": _CAUTION if size.seeds < FEW_SEEDS else "",
        "candidates": str(size.candidates),
        "tuning_seeds": f"{size.tuning.start} to {size.tuning.stop - 1}",
        "seeds": f"{size.reported.start} to {size.reported.stop - 1}",
        "versions": escape(", ".join(f"{name} {version}" for name, version in versions().items())),
        "lead": lead,
        "claims": _claims(claims),
        "sections": "\n".join(sections),
    }
    for name, text in parts.items():
        template = template.replace(f"{{{{{name}}}}}", text)
    return template
