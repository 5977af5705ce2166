"""Packet filters of the virtual switch: none looks at its frames.

Where the machine's kernel has `br_netfilter`, as for containers, every bridge of a new namespace shows each frame to
the namespace's filters. Here they are empty, and yet an exchange at 100 Mbit/s takes 3 % longer for it and its ranks a
twentieth to a tenth more CPU time: results would hang on a module that nobody sees.

Source: Linux, Documentation/networking/ip-sysctl.rst, bridge-nf-call-*.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_SETTINGS = Path("/proc/sys/net/bridge")


def leave_out() -> None:
    """For the bridges of this process's own network namespace."""
    for setting in _SETTINGS.glob("bridge-nf-call-*"):
        with contextlib.suppress(OSError):  # some sandboxes let nobody write it: frames then take longer, and arrive
            setting.write_text("0", encoding="ascii")
