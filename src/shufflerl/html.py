"""How values show themselves in notebooks: small tables and figures that need nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from shufflerl.arrays import FloatArray, PolicyArray

#: Larger policies are not shown state by state.
MAX_STATES, MAX_STEPS = 16, 24


def table(title: str, rows: Mapping[str, object], more: str = "") -> str:
    """A titled table of names and values, and what is to stand below it."""
    body = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{escape(str(value))}</td></tr>"
        for name, value in rows.items()
    )
    return f"<div><b>{escape(title)}</b><table><tbody>{body}</tbody></table>{more}</div>"


def folded(title: str, text: Mapping[str, str]) -> str:
    """Paragraphs that open when asked for."""
    body = "".join(f"<p><b>{escape(name)}</b>: {escape(words)}</p>" for name, words in text.items())
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def curve(x: Sequence[float], y: Sequence[float], label: str) -> str:
    """A small figure of y against x, from zero."""
    width, height = 320, 90
    right, top = max(*x, 1e-300), max(*y, 1e-300)
    points = " ".join(f"{width * a / right:.1f},{height * (1 - b / top):.1f}" for a, b in zip(x, y, strict=True))
    line = f"<polyline points='{points}' fill='none' stroke='#0072B2' stroke-width='2'/>"
    frame = f"<svg width='{width}' height='{height}' role='img' aria-label='{escape(label)}'>{line}</svg>"
    return f"<div>{frame}<div><small>{escape(label)}</small></div></div>"


def policy(actions: PolicyArray, shares: FloatArray | None = None) -> str:
    """actions[h, x] as a table, rows steps and columns states; the fewer users are told so, the fainter."""
    steps, states = actions.shape
    if steps > MAX_STEPS or states > MAX_STATES:
        return f"<p><small>{steps} steps x {states} states: too large to show.</small></p>"
    head = "".join(f"<th>x={x}</th>" for x in range(states))
    rows = ""
    for h in range(steps):
        faint = ["" if shares is None else f" style='opacity:{0.25 + 0.75 * shares[h, x]:.2f}'" for x in range(states)]
        cells = "".join(f"<td{style}>{action}</td>" for style, action in zip(faint, actions[h], strict=True))
        rows += f"<tr><th>h={h}</th>{cells}</tr>"
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>"
