"""Figures, in one style, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from shufflerl.errors import InvalidInputError, MissingExtraError

try:
    import matplotlib as mpl

    mpl.use("Agg")  # figures go to files; no screen is needed
    from matplotlib.figure import Figure
except ImportError as missing:
    raise MissingExtraError("Figures need matplotlib; install it with: pip install 'shufflerl[plots]'.") from missing

#: Okabe-Ito: told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


SUFFIXES = (".png", ".svg", ".pdf")


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that many inches."""
    return Figure(figsize=(width, height), layout="constrained")


def styled_by(settings: dict[Any, Any]) -> AbstractContextManager[None]:
    """Draw with these settings of matplotlib's."""
    return mpl.rc_context(settings)


def check_path(path: Path) -> None:
    """Refuse a place that no figure could be written to."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidInputError(f"Cannot write {path.name!r}. Use a name ending in {', '.join(SUFFIXES)}.")
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InvalidInputError(f"Cannot write {path}: no file can be made there; choose another folder or name.")


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = path.suffix.lstrip(".")
        figure.savefig(partial, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
        partial.replace(path)
    except OSError as reason:
        raise InvalidInputError(f"Cannot write {path}: {reason.strerror}. Choose another place.") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
