"""Logs: one JSON object per line, without origins."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

log = logging.getLogger("shufflerl.network")


def event(name: str, **fields: Any) -> None:
    """Log something that happened."""
    log.info(name, extra={"fields": fields})


class _Lines(logging.Formatter):
    """One JSON object per line: what happened, never from where."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {"time": round(record.created, 3), "level": record.levelname.lower(), "event": record.getMessage()}
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def to_standard_error() -> None:
    """Log as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    log.setLevel(logging.INFO)
