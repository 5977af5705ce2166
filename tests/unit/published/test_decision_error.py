"""The simulation of wrong decisions, through the search and the rule of `bench decide`."""

from benchmarks.decision_error import simulate


def test_errors_of_timing_jobs_do_not_pass_for_differences() -> None:
    found = simulate(1, 1.0, spread=0.0, job_error=0.08, decisions=60)
    assert found["wrong"] <= 0.05  # if blocks counted as independent, a third


def test_errors_of_timing_jobs_do_not_hide_a_large_difference() -> None:
    found = simulate(3, 1.5, spread=0.05, job_error=0.02, decisions=20)
    assert found["wrong"] == 0.0
    assert found["by_sixth"] >= 0.8
