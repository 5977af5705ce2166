"""Files of the benchmarks of predictions: the randomly drawn configurations, and results for published figures."""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks import predict_published
from benchmarks.predict_validation import FILES, drawn


def test_the_configurations_are_those_that_the_seed_draws() -> None:
    written = {path: path.read_text() for path in FILES.glob("*.toml")}
    assert written == drawn()


def test_the_table_of_published_speedups_is_what_the_model_says_now() -> None:
    with Path("results/reference/predict-published.csv").open(newline="") as file:
        kept = list(csv.DictReader(file))
    now = [
        {name: "" if value is None else str(value) for name, value in row.items()} for row in predict_published.table()
    ]
    assert kept == now
