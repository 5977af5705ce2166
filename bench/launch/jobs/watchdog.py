"""WatchdogTimeouts, which says how long a job may report nothing before its launcher stops it.

Ranks that wait too long find out which rank is lost or late, which is a better message than the launcher's "no report".
So the launcher stops a job only after the ranks have had time for that, and their parents time to end them.
"""

from __future__ import annotations

import dataclasses
from typing import Self

from bench.core.config.job import RanksConfig
from bench.hosts.supervisor import STOP_GRACE_S

# Ranks need up to three grace periods of the failure detector to agree which rank they lost. Not imported from the
# detector's module, because that imports torch.
FIND_OUT_S = 12.0
# Time for torchrun to see that a rank ended, and to end the other ranks of its host.
END_S = 3.0
# Time for the other hosts to find out why a host failed, and to write their reports.
HOSTS_GRACE_S = FIND_OUT_S + END_S
# Starting many processes on few cores takes longer than most steps do.
START_S = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchdogTimeouts:
    """Seconds without a report after which a job is stopped.

    Attributes:
        first_s: limit before the first report, or the first answer of machine 0; all machines must start within it.
        next_s: limit after each report or answer.
    """

    first_s: float
    next_s: float

    @classmethod
    def with_job(cls, job: RanksConfig) -> Self:
        """Return the limits for this machine's part of a job."""
        if job.world_size == 1:
            return cls(first_s=max(job.timeout_s, START_S), next_s=job.timeout_s)
        next_s = job.timeout_s + FIND_OUT_S + END_S
        if job.cluster is not None:  # a host that hangs is stopped some time after another one failed
            next_s += HOSTS_GRACE_S + STOP_GRACE_S
        return cls(first_s=max(next_s, START_S), next_s=next_s)

    @classmethod
    def with_one_process(cls, timeout_s: float) -> Self:
        """Return the limits for a job of one process, which waits for no other and so is silent only if it hangs."""
        return cls(first_s=timeout_s, next_s=timeout_s)
