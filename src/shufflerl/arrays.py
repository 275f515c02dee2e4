"""Arrays by what they hold."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

#: Numbers of states, which fit 32 bits.
StateArray = NDArray[np.int32]

#: A deterministic policy is an array of actions[h, x]; many of them are one array [m, h, x].
PolicyArray = NDArray[np.int32]
