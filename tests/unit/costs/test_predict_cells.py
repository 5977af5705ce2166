"""The configurations on which predictions are judged: what their seed draws, and nothing else."""

from __future__ import annotations

from benchmarks.predict_validation import FILES, drawn


def test_the_configurations_are_those_that_the_seed_draws() -> None:
    written = {path: path.read_text() for path in FILES.glob("*.toml")}
    assert written == drawn()
