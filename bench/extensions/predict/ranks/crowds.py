"""What ranks that compute on the same cores take from each other, from what was measured with some."""

from __future__ import annotations

import numpy as np

from bench.extensions.predict.calibration import Calibration, CpuContention


def crowd_at(calibration: Calibration, load: float) -> CpuContention:
    """A step at any load, threads that compute / cores.

    At the least it takes the CPU time of a rank by itself, which other work on the machine did not lengthen. Between
    two loads that were measured times are interpolated. Beyond the last they grow as the turns do that threads have to
    take, of which there are none before every core has its thread; the CPU time of each stays.
    """
    loads = [crowd.load for crowd in calibration.crowds]
    times = np.array(
        [work_alone(calibration), *((*crowd.handed_over_s, crowd.computed_s) for crowd in calibration.crowds[1:])]
    )
    *handed_over, computed_s = (float(np.interp(load, loads, of_crowds)) for of_crowds in times.T)
    turns = max(1.0, load / max(1.0, loads[-1]))
    return CpuContention(
        load=load,
        handed_over_s=tuple(turns * at for at in handed_over),
        computed_s=turns * computed_s,
        cpu_s=float(np.interp(load, loads, [crowd.cpu_s for crowd in calibration.crowds])),
    )


def work_alone(calibration: Calibration) -> tuple[float, ...]:
    """CPU time of a rank by itself until each bucket is ready, and until backward has ended."""
    before_s = calibration.batch_s + calibration.forward_s
    return (*(before_s + bucket.ready_s for bucket in calibration.buckets), calibration.computed_s)
