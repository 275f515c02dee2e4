"""The networked system: the learner that runs in simulation learns from nodes over HTTP.

Three roles that trust each other with as little as they can, in separate processes with separate keys and files:

- a **node** plays one episode, adds its noise and seals every message to the coordinator;
- the **shuffler** knows who sent something but cannot read it; it permutes whole batches;
- the **coordinator** reads the messages but never learns where one came from; it counts and drives the learner.

Each has its folder; `protocol` is what they say to each other, `stores` what survives a crash, `web` what both servers
share on HTTP. Read `protocol.wire`, then `protocol.agreement` for what a node checks before it says anything, then
`shuffler.shuffler`, `coordinator.coordinator` and `node.reporting`, which hold no sockets; `shuffler.app`,
`coordinator.app` and `node.node` put them on HTTP.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shufflerl.errors import MissingExtraError

if TYPE_CHECKING:
    from shufflerl.network.node.node import Node, Receipt, RunOverError, TimeLimitError
    from shufflerl.network.node.reporting import Invitation
    from shufflerl.network.protocol.agreement import Terms

__all__ = ["Invitation", "Node", "Receipt", "RunOverError", "Terms", "TimeLimitError"]

_HOME_OF = {"Invitation": "node.reporting", "Terms": "protocol.agreement"} | dict.fromkeys(
    ("Node", "Receipt", "RunOverError", "TimeLimitError"), "node.node"
)


def check_installed() -> None:
    """Say which extra is missing, if it is."""
    try:
        import cryptography.hazmat.primitives.hpke  # noqa: F401
        import httpx2  # noqa: F401
        import msgspec  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "The networked system is not installed; install it with: pip install 'shufflerl[network]'"
        ) from None


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        check_installed()
        return getattr(import_module(f"shufflerl.network.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'shufflerl.network' has no attribute {name!r}")
