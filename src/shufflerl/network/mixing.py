"""What the shuffler does with sealed reports: it opens their envelopes and permutes all tags of a batch."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from shufflerl.network import crypto, wire
from shufflerl.network.agreement import Agreement
from shufflerl.network.crypto import UnsealError
from shufflerl.network.wire import ProblemError, Reason
from shufflerl.privacy import randomness


def opened(agreement: Agreement, key: X25519PrivateKey, report: bytes, envelope: bytes) -> tuple[bytes, memoryview]:
    """A report's token and what its transport sends."""
    try:
        text = crypto.unseal(key, agreement.envelope_info(report), envelope)
    except UnsealError:
        raise ProblemError(
            Reason.undecryptable,
            "The envelope cannot be opened with this batch's key and report id; fetch the current batch.",
        ) from None
    return text[: wire.TOKEN_BYTES], memoryview(text)[wire.TOKEN_BYTES :]


def permuted(tags: bytes) -> list[bytes]:
    """The sealed tags of a batch in a uniformly random order, in chunks."""
    rows: NDArray[np.uint8] = np.frombuffer(tags, dtype=np.uint8).reshape(-1, wire.SEALED_TAG_BYTES)
    mixed = rows[randomness.permutation(len(rows))]
    return [mixed[first : first + wire.CHUNK_TAGS].tobytes() for first in range(0, len(mixed), wire.CHUNK_TAGS)]
