"""WatchdogTimeouts: how long a job may be silent before its launcher stops it.

Ranks that wait in vain find out by themselves who is lost or late, which says more than that nothing was heard. So the
launcher steps in only after all that they, and whoever ends them, may take.
"""

from __future__ import annotations

import dataclasses
from typing import Self

from bench.core.config.job import RanksConfig
from bench.hosts.supervisor import STOP_GRACE_S

# Ranks that waited in vain take up to three grace periods of the failure detector to agree on whom they lost. A number,
# because the detector's module imports torch.
FIND_OUT_S = 12.0
# torchrun sees that a rank ended, and ends the others of its host.
END_S = 3.0
# After one host failed, the others get so long to find out why, and to leave their reports.
HOSTS_GRACE_S = FIND_OUT_S + END_S
# Starting many processes on few cores takes longer than most steps do.
START_S = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchdogTimeouts:
    """Seconds of silence after which a job is stopped.

    Attributes:
        first_s: before its first report, or machine 0's first answer; several machines have so long to come.
        next_s: after any later one.
    """

    first_s: float
    next_s: float

    @classmethod
    def with_job(cls, job: RanksConfig) -> Self:
        """What this machine's part of a job needs."""
        if job.world_size == 1:
            return cls(first_s=max(job.timeout_s, START_S), next_s=job.timeout_s)
        next_s = job.timeout_s + FIND_OUT_S + END_S
        if job.cluster is not None:  # a host that hangs is stopped a while after another one failed
            next_s += HOSTS_GRACE_S + STOP_GRACE_S
        return cls(first_s=max(next_s, START_S), next_s=next_s)

    @classmethod
    def with_one_process(cls, timeout_s: float) -> Self:
        """One that waits for nobody, so it is silent only when it hangs."""
        return cls(first_s=timeout_s, next_s=timeout_s)
