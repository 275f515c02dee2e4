"""Options that commands of several rooms share."""

from __future__ import annotations

from typing import Annotated

import typer

#: What delta is. It is not the probability that the loss exceeds epsilon, which may be many times as large.
DELTA_HELP = "Allowed beyond epsilon: P(seen) <= e^epsilon P'(seen) + delta."

AsJson = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object.")]
