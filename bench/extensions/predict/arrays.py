"""The type of arrays of floating-point numbers; `collectives.schedule.waves.Ints` is that of integers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
