"""Points at which a process may be told to die, so that tests can kill it exactly there.

With SHUFFLERL_CRASH_AT=label, or label:3 for the third time, the process ends by SIGKILL when it reaches that label: no
handler runs, nothing is flushed. Unset, which is always so in production, a label costs one comparison.
"""

from __future__ import annotations

import os
import signal

#: Every label there is, in the order in which a batch meets them. Tests kill at each.
SHUFFLER_LABELS = ("ingest", "seal", "permute", "release", "released", "scrub", "scrubbed")
#: Between sealing and release, where vectors are summed.
SUMMING_LABELS = ("order", "seeds", "exclude", "slice", "sum")
#: Where the servers add the noise: while tags come in, and where vectors are summed.
NOISE_LABELS = ("dummies", "noise")
COORDINATOR_LABELS = ("publish", "published", "open", "ledger", "charged", "learner save", "saved", "acknowledge")
UNMASKING_LABELS = ("seeds opened", "excluding", "excluded")

_label, _, _times = os.environ.get("SHUFFLERL_CRASH_AT", "").partition(":")
_left = int(_times or 1)


def reached(label: str) -> None:
    """Die here, if told to."""
    global _left  # noqa: PLW0603 - one process, one death
    if label == _label:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
