"""`python -m tests.attack [--seed N] [--minutes M] [--only PART] [--tries N]`: exit code 1 if anything failed."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections.abc import Callable

from tests.attack import inputs, kills, plugins, resumes, sockets
from tests.attack.tally import Tally

# Part -> (function, largest number of tries, share of the time).
PARTS: dict[str, tuple[Callable[[random.Random, Tally, int], None], int, float]] = {
    "inputs": (inputs.attack, 1000, 0.3),
    "plugins": (plugins.attack, 40, 0.1),
    "sockets": (sockets.attack, 9, 0.15),
    "kills": (kills.attack, 60, 0.25),
    "resumes": (resumes.attack, 40, 0.2),
}


def main() -> int:
    """Run the parts one after another."""
    parser = argparse.ArgumentParser(prog="attack", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="seed of all random choices")
    parser.add_argument("--minutes", type=float, default=25.0, help="longest time for all parts")
    parser.add_argument("--only", choices=PARTS, help="run only this part")
    parser.add_argument("--tries", type=int, help="number of tries of each part, in place of its default")
    options = parser.parse_args()
    # Shells start background processes with Ctrl-C ignored, and the runs that the attack stops would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tallies = []
    for name, (attack, tries, share) in PARTS.items():
        if options.only in (None, name):
            minutes = options.minutes * (1 if options.only else share)
            tally = Tally(name, until=time.monotonic() + 60 * minutes)
            attack(random.Random(f"{options.seed} {name}"), tally, options.tries or tries)
            print(tally, flush=True)
            tallies.append(tally)
    num_failures = sum(len(tally.failures) for tally in tallies)
    print(f"seed {options.seed}: {num_failures} failures")
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
