"""Options that commands of several rooms share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

#: What delta is. It is not the probability that the loss exceeds epsilon, which may be many times as large.
DELTA_HELP = "Allowed beyond epsilon: P(seen) <= e^epsilon P'(seen) + delta."


#: Who adds the noise.
NoiseBy = Literal["users", "servers"]
AsJson = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object.")]


def _whole(text: str | int) -> int:
    from shufflerl.checks import read_whole

    try:
        return read_whole(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no whole number; write it as 20000 or 2e4.") from None


def count(help: str) -> Any:
    """An option for a whole number, which may be written as 1e4."""
    return typer.Option(help=help, parser=_whole, metavar="N")
