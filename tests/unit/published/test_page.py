"""Pages: complete for any rows, with a note on missing figures, and without figures that no row has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.core.rows import RowWriter
from bench.core.schema import METRICS
from bench.report.store import collect_runs
from benchmarks.published.figures import SweepRuns
from benchmarks.published.page import claims_table, origin, values_table, write_page, write_text
from benchmarks.published.setups import LINKS, METHODS
from benchmarks.published.summary import DENSE, entries_of, link_table, recommendation, verdicts_table, write_summary
from benchmarks.published.sweeps import PAGES, SWEEPS, keep_rows
from benchmarks.published.systems import SYSTEMS
from tests.testing.fake_rows import fake_row, write_runs


def no_runs(folder: Path) -> dict[str, SweepRuns]:
    return {name: SweepRuns.read(sweep.csv(folder)) for name, sweep in SWEEPS.items()}


@pytest.fixture(scope="module")
def committed() -> dict[str, SweepRuns]:
    return {name: SweepRuns.read(sweep.csv(PAGES)) for name, sweep in SWEEPS.items()}


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_committed_page_has_the_figures_of_the_committed_rows(name: str, committed: dict[str, SweepRuns]) -> None:
    system, page = SYSTEMS[name], (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert claims_table(system.claims, committed) in page
    assert origin(system.sweeps, committed) in page
    assert all(values_table(table, committed[table.sweep]) in page for table in system.tables)


def test_the_committed_summary_has_the_figures_of_the_committed_rows(committed: dict[str, SweepRuns]) -> None:
    page = (PAGES / "README.md").read_text(encoding="utf-8")
    together = committed["together"]
    assert verdicts_table(list(SYSTEMS.values()), committed) in page
    for link, bandwidth in LINKS.items():
        entries = entries_of(together, bandwidth)
        assert link_table(link, entries, together) in page
        assert recommendation(link, entries, together) in page


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_page_without_rows_says_so_for_every_claim(name: str, tmp_path: Path) -> None:
    system = SYSTEMS[name]
    write_page(system, no_runs(tmp_path), tmp_path)
    text = (tmp_path / f"{name}.md").read_text()
    assert "$" not in text
    assert all(claim.text in text for claim in system.claims)
    assert "| not measured |" in text
    assert "reproduced |" not in text
    assert all(f"`{SWEEPS[sweep].command}`: not run." in text for sweep in system.sweeps)


def test_a_page_of_the_quick_version_says_that_it_is_one(tmp_path: Path) -> None:
    write_page(SYSTEMS["hylo"], no_runs(tmp_path), tmp_path, quick=True)
    title, _, banner, *_ = (tmp_path / "hylo.md").read_text().splitlines()
    assert title.startswith("# ")
    assert banner.startswith("**The quick version**: one seed")


def together(speed_up: float, seeds: int = 3) -> list[dict[str, object]]:
    """Return every method on every link; ALGC is faster than the others by this factor."""
    rows = []
    for link, bandwidth in LINKS.items():
        for method, which in METHODS.items():
            for seed in range(1, seeds + 1):
                time = (10.0 + seed / 10) / (speed_up if method == "ALGC" else 1.0)
                row = {"train_time_s": 20.0, "time_to_target_s": time, "test_accuracy": 0.9 + seed / 100}
                identity = {"run_id": f"{method}-{link}-{seed}", "config_id": f"{method}-{link}", "optimizer": "sgd"}
                rows.append(
                    fake_row(**{**identity, **which, **bandwidth, **row}, seed=seed, started_at="2026-01-01T00:00")
                )
    return rows


def summary_of(folder: Path, rows: list[dict[str, object]]) -> str:
    RowWriter(folder / "together.csv").extend(rows)
    write_summary(list(SYSTEMS.values()), no_runs(folder), folder)
    return (folder / "README.md").read_text()


def test_what_is_recommended_follows_from_the_rows(tmp_path: Path) -> None:
    text = summary_of(tmp_path, together(speed_up=2.0, seeds=6))  # with fewer seeds, equal values may be a coincidence
    assert (
        "- **10 Mbit/s**: ALGC, 2.00 [2.00, 2.00]x sooner than dense; all others that reached it are surely slower."
        in text
    )
    assert (tmp_path / "summary.svg").stat().st_size > 1000
    assert "| [algc](algc.md) |" in text


def test_methods_that_the_interval_does_not_tell_apart_are_named(tmp_path: Path) -> None:
    text = summary_of(tmp_path, together(speed_up=1.0))
    (line,) = [line for line in text.splitlines() if line.startswith("- **1 Gbit/s**")]
    assert line.startswith(f"- **1 Gbit/s**: {DENSE}; not told apart from it: ")
    assert all(method in line for method in METHODS)


@pytest.mark.parametrize(
    ("seeds", "changes", "said"),
    [
        (1, {}, "**1 Gbit/s**: fewer than 3 seeds, so nothing is recommended."),
        (3, {"time_to_target_s": None}, "**1 Gbit/s**: no method reached the target with every seed"),
    ],
)
def test_where_rows_decide_nothing_the_page_says_why(
    seeds: int, changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    assert said in summary_of(tmp_path, [row | changes for row in together(2.0, seeds)])


def test_rows_of_the_sweep_that_have_ended_are_kept_without_columns_that_none_of_them_fills(tmp_path: Path) -> None:
    running = fake_row(seed=4, digest="4", status="running")
    write_runs(tmp_path / "runs", [*(fake_row(seed=seed, digest=str(seed)) for seed in (1, 2, 3)), running])
    keep_rows(SWEEPS["hylo_links"], tmp_path / "runs", {"1", "2", "4"}, tmp_path)
    heading, *lines = (tmp_path / "hylo_links.csv").read_text().splitlines()
    assert len(lines) == 2
    assert "compressor" in heading.split(",")
    assert "staleness_max" not in heading.split(",")


def test_a_sweep_none_of_whose_runs_has_ended_is_one_that_was_not_run(tmp_path: Path) -> None:
    sweep = SWEEPS["group_topk_sharing"]
    write_runs(tmp_path / "runs", [fake_row(digest="asked", run_id="now", status="running")])
    sweep.csv(tmp_path).write_text("rows of before\n")
    keep_rows(sweep, tmp_path / "runs", {"asked"}, tmp_path)
    assert origin([sweep.name], no_runs(tmp_path)).endswith("not run.")


def test_runs_that_failed_and_do_not_know_when_they_began_are_counted(tmp_path: Path) -> None:
    rows = [fake_row(run_id="good"), fake_row(run_id="bad", seed=2, status="failed", started_at=None)]
    RowWriter(tmp_path / "harder.csv").extend(rows)
    text = origin(["harder"], no_runs(tmp_path))
    assert "1 ok, 1 failed, seeds 1, 2" in text
    assert "begun 2026-03-01T10:00:00Z" in text


def test_no_link_leads_to_rows_that_were_not_made(tmp_path: Path) -> None:
    (tmp_path / "done.csv").touch()
    write_text("# Title\n[rows](done.csv), [rows](later.csv)\n", tmp_path / "page.md", quick=False)
    assert (tmp_path / "page.md").read_text() == "# Title\n[rows](done.csv), `later.csv` (not made yet)\n"


def test_a_page_counts_the_runs_that_shared_their_cores() -> None:
    empty: dict[str, Any] = {column.name: None for column in METRICS}
    shares = enumerate((0.0, None, 0.4))
    rows = [empty | fake_row(run_id=f"r{number}", other_cpu_share=share) for number, share in shares]
    runs = SweepRuns(path=SWEEPS["group_topk"].file, rows=rows, runs=collect_runs(rows))
    assert "in 1 runs other programs took more than 10% of the cores" in origin(["group_topk"], {"group_topk": runs})
