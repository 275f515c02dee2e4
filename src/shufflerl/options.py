"""Options that commands of several rooms share."""

from __future__ import annotations

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object.")]
