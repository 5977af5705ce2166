"""Environment variables for threads and memory of every started process."""

from __future__ import annotations

from bench.launch.jobs.fork_server import job_variables


def test_blocks_are_kept_up_to_a_size_that_every_glibc_accepts() -> None:
    given = job_variables(3)
    assert given["OMP_NUM_THREADS"] == given["MKL_NUM_THREADS"] == "3"
    # half of the largest heap of a thread: 2 x 4 MiB x 8 bytes on 64 bits; glibc before 2.35 refuses more
    assert int(given["MALLOC_MMAP_THRESHOLD_"]) <= 32 * 2**20 < int(given["MALLOC_TRIM_THRESHOLD_"])
