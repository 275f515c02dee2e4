"""Ports that nobody else is given: below those that systems hand out, a range for each process of tests."""

from __future__ import annotations

import contextlib
import os
import socket

_EACH = 2_000
_first = 10_000 + _EACH * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 10)
_candidates = iter(range(_first, _first + _EACH))


def free_port() -> int:
    """Another one every time: whoever dies may come back on it."""
    for port in _candidates:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"None of the ports {_first} to {_first + _EACH - 1} is free.")
