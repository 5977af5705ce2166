"""What arrays of figures are called; those of whole numbers are `collectives.schedule.waves.Ints`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
