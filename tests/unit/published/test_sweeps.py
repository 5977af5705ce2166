"""The sweeps behind the pages: every figure has a configuration, and the quick version is a part of the whole."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.core.config.run import RunConfig
from bench.core.schema import METRICS
from bench.launch.plan import plan
from bench.launch.sweep_file import read_sweep
from bench.report.store import Row, Run
from benchmarks.published import summary
from benchmarks.published.claims import Claim
from benchmarks.published.figures import SweepRuns, Which
from benchmarks.published.setups import LINKS, METHODS
from benchmarks.published.sweeps import FILES, SWEEPS, quick_version, write_sweep
from benchmarks.published.systems import SYSTEMS
from benchmarks.published.tuning import RATE_NEUTRAL_OPTIONS, TUNED_SWEEPS, best_for, method_of, tuning_files

ROOT = Path(__file__).parents[3]
EMPTY: Row = {column.name: None for column in METRICS}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@functools.cache
def planned(name: str) -> SweepRuns:
    """Return a sweep as if every run of its first seed had ended well."""
    sweep = read_sweep(SWEEPS[name].file)
    asked = [RunConfig(**(sweep.base | options)) for options in sweep.configurations()]
    configs = [plan(each) for each in asked]
    own = [{"config_id": config.config_id, "status": "ok", "seed": 1} for config in configs]
    rows = [EMPTY | config.columns() | more for config, more in zip(configs, own, strict=True)]
    return SweepRuns(path=SWEEPS[name].file, rows=rows, runs=[Run(rows=[row]) for row in rows])


def wanted(name: str) -> Iterator[Which]:
    """Yield every configuration of a sweep that a page uses."""
    for system in SYSTEMS.values():
        for claim in system.claims:
            if isinstance(claim, Claim) and claim.sweep == name:
                yield from (side for measure in claim.measures.values() for side in measure.sides)
        for table in system.tables:
            yield from (which for _, which in table.rows if table.sweep == name)
        for drawing in system.drawings:
            yield from (which for which in drawing.only if drawing.sweep == name)
    if name == summary.SWEEP:
        yield from ({**which, **link} for which in METHODS.values() for link in LINKS.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEPS)
def test_every_figure_of_the_pages_has_exactly_one_configuration(name: str) -> None:
    runs = planned(name)
    asked_for = list(wanted(name))
    assert asked_for
    for which in asked_for:
        assert len(runs.by_seed(which)) == 1


@pytest.mark.parametrize("name", SWEEPS)
def test_the_quick_version_has_one_seed_and_no_other_configurations(name: str, tmp_path: Path) -> None:
    quick, whole = quick_version(SWEEPS[name]), read_sweep(SWEEPS[name].file)
    write_sweep(quick, tmp_path / "quick.toml")
    written = read_sweep(tmp_path / "quick.toml")
    assert written.seeds == whole.seeds[:1]
    assert written.configurations() == quick.configurations()

    def kept(options: dict[str, object]) -> list[tuple[str, object]]:
        return sorted((key, value) for key, value in options.items() if key not in SWEEPS[name].quick)

    assert all(kept(options) in [kept(each) for each in whole.configurations()] for options in quick.configurations())


@pytest.mark.parametrize("name", TUNED_SWEEPS)
def test_rates_are_those_that_were_best_in_the_tuning(name: str) -> None:
    missing = [file for file in tuning_files(name) if not file.is_file()]
    best = best_for(name)
    for run in planned(name).runs:
        if missing and method_of(run) not in best:
            continue
        chosen = best[method_of(run)]
        assert run["lr"] == chosen.lr, method_of(run)
        if not any(f"{option}=" in run["compressor"] for option in RATE_NEUTRAL_OPTIONS):
            assert run["compressor"] == chosen.compressor
    if missing:
        pytest.skip(f"{missing[0]} is not there; `python -m benchmarks.published --tune` makes it")


def test_every_file_is_a_sweep_of_the_pages() -> None:
    clusters = {f"nodes{count}" for count in (2, 4, 8)}
    assert {path.stem for path in FILES.glob("*.toml")} == {*SWEEPS, *clusters}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("shortest time of convergence", "algc"),
        ("shortest time of convergence", "together"),
        ("largest speed-up", "algc_nodes"),
    ],
)
def test_a_superlative_of_algc_is_judged_against_every_other_method_that_was_run(text: str, name: str) -> None:
    runs = planned(name)
    claims = [claim for claim in SYSTEMS["algc"].claims if isinstance(claim, Claim) and claim.counts]
    against = [
        measure.sides[1]
        for claim in claims
        if (claim.text, claim.sweep) == (text, name)
        for measure in claim.measures.values()
    ]
    judged = {run["config_id"] for than in against for run in runs.by_seed(than).values()}
    assert judged == {run["config_id"] for run in runs.runs if run["compressor"] != "algc"}
