"""Saved state as bytes: a JSON header and NumPy arrays in one npz. No pickles: loading runs no code."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shufflerl.errors import StateMismatchError

_HEADER = "header"


def pack(header: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> bytes:
    """Bytes that `unpack` turns back into the same header and arrays."""
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    np.savez(buffer, allow_pickle=False, **{_HEADER: text}, **arrays)
    return buffer.getvalue()


def unpack(saved: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The header and arrays of a saved state."""
    try:
        archive = np.load(io.BytesIO(saved), allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("a single array")
        with archive:
            arrays = {name: archive[name] for name in archive.files}
        header = json.loads(arrays.pop(_HEADER).tobytes())
        if not isinstance(header, dict):
            raise ValueError("its header is not an object")
        return header, arrays
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as reason:
        raise StateMismatchError(
            f"This is not a saved state, or it is damaged ({reason}); use bytes that save() returned."
        ) from None
