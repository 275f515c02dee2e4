"""The OpenAPI descriptions of both servers, made from the messages themselves."""

from __future__ import annotations

from typing import Any

import msgspec

from shufflerl import __version__
from shufflerl.network.protocol import wire

_KINDS = (wire.BatchStatus, wire.ProblemDetail, wire.Upload, wire.Signed)
_, _components = msgspec.json.schema_components(_KINDS, ref_template="#/components/schemas/{name}")
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_PROBLEM = {
    "description": "A problem (RFC 9457).",
    "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemDetail"}}},
}
_TASK = {
    "name": "task",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
}


def _answer(description: str, kind: str | None = None, media: str = "application/json") -> dict[str, Any]:
    if kind is not None:
        content: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{kind}"}}
    else:
        content = {"schema": {"type": "object"}} if media == "application/json" else _BINARY
    return {"description": description, "content": {media: content}}


def _operation(
    summary: str, answer: dict[str, Any], *, takes: type[wire.Message] | None = None, task: bool = False
) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": answer, "4XX": _PROBLEM, "5XX": _PROBLEM}}
    if takes is not None:
        operation["requestBody"] = {
            "required": True,
            "description": "As MessagePack, bytes as bytes; see docs/wire.md.",
            "content": {wire.MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{takes.__name__}"}}},
        }
    if task:
        operation["parameters"] = [_TASK]
    return operation


_OPERATIONS = {
    "/": {"get": _operation("A page to watch it.", _answer("The page.", media="text/html"))},
    "/v1/events": {
        "get": _operation("What the page shows, whenever it changes.", _answer("Events.", media="text/event-stream"))
    },
    "/healthz": {"get": _operation("Whether the process is alive.", _answer("It is."))},
    "/readyz": {"get": _operation("Whether it can do its work.", _answer("It can."))},
    "/metrics": {"get": _operation("Figures for Prometheus.", _answer("Figures.", media="text/plain"))},
    "/openapi.json": {"get": _operation("This description.", _answer("It."))},
}


def _described(title: str, paths: dict[str, Any]) -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": paths | _OPERATIONS,
        "components": {"schemas": _components},
    }


SHUFFLER = _described(
    "shufflerl shuffler",
    {
        "/v1/tasks/{task}/batch": {
            "get": _operation("The last batch.", _answer("An OpenBatch.", media=wire.MEDIA_TYPE), task=True)
        },
        "/v1/tasks/{task}/status": {
            "get": _operation("How the last batch is doing.", _answer("Its status.", "BatchStatus"), task=True)
        },
        "/v1/tasks/{task}/reports": {
            "post": _operation(
                "Send reports.", _answer("Outcomes.", media=wire.MEDIA_TYPE), takes=wire.Upload, task=True
            )
        },
        "/v1/announcements": {
            "post": _operation("Open a batch.", _answer("Its status.", "BatchStatus"), takes=wire.Signed)
        },
        "/v1/seeds": {
            "post": _operation(
                "A chunk of sealed seeds.", _answer("Seeds.", media="application/octet-stream"), takes=wire.Signed
            )
        },
        "/v1/exclusions": {
            "post": _operation("Say which cannot be opened.", _answer("Status.", "BatchStatus"), takes=wire.Signed)
        },
        "/v1/releases": {
            "post": _operation(
                "A chunk of a release.", _answer("Tags or a sum.", media="application/octet-stream"), takes=wire.Signed
            )
        },
        "/v1/scrubs": {
            "post": _operation(
                "Delete a release; the last ends the run.", _answer("Its status.", "BatchStatus"), takes=wire.Signed
            )
        },
    },
)

COORDINATOR = _described(
    "shufflerl coordinator",
    {
        "/v1/status": {"get": _operation("How the run is doing.", _answer("Its status."))},
        "/v1/policy": {"get": _operation("The policy deployed last.", _answer("The policy."))},
        "/v1/certificate": {"get": _operation("What users are guaranteed.", _answer("The certificate."))},
        "/v1/batches": {"get": _operation("What was seen of every batch.", _answer("Noisy counts."))},
    },
)

OF = {"shuffler": SHUFFLER, "coordinator": COORDINATOR}
