"""Options and columns of the two commands follow the rules of all others."""

from __future__ import annotations

import pytest

from bench.core.columns import Column
from bench.core.config.configuration import Configuration
from bench.core.config.run import RanksConfig, RunConfig
from bench.extensions.microbenchmarks.columns import COLLECTIVES, COMPRESSORS, PAGE, document
from bench.extensions.microbenchmarks.measurement import check_sums
from bench.extensions.microbenchmarks.options import CollectivesConfig, CompressorsConfig
from bench.launch.plan import place, plan
from tests.testing.invoke import REPOSITORY, invoke
from tests.unit.core.test_config import assert_complete
from tests.unit.core.test_numeric_ranges import assert_among_options, assert_two_finite_ends, numbers_of
from tests.unit.core.test_schema import assert_declared_completely
from tests.unit.launch.test_placement import HOSTS

COMMANDS: dict[type[Configuration], str] = {CollectivesConfig: "collectives", CompressorsConfig: "compressors"}


def test_ranks_are_placed_as_in_a_run() -> None:
    run = plan(RunConfig(**HOSTS))
    sums, _ = check_sums(CollectivesConfig(**HOSTS))
    for name, value in vars(place(RanksConfig(**HOSTS))).items():
        assert getattr(run, name) == getattr(sums, name) == value, name


@pytest.mark.parametrize("configuration", COMMANDS)
def test_options_are_complete(configuration: type[Configuration]) -> None:
    assert_complete(configuration)


@pytest.mark.parametrize(("cls", "name"), numbers_of(COMMANDS), ids=lambda value: getattr(value, "__name__", value))
def test_a_number_has_two_finite_ends(cls: type, name: str) -> None:
    assert_two_finite_ends(cls, name)


def test_every_declared_option_is_among_those_of_the_commands() -> None:
    assert_among_options(COMMANDS)


@pytest.mark.parametrize("columns", [COLLECTIVES, COMPRESSORS], ids=["collectives", "compressors"])
def test_every_column_is_declared_once_and_completely(columns: tuple[Column, ...]) -> None:
    assert_declared_completely(columns)


def test_the_columns_of_bench_collectives_are_these_and_in_this_order() -> None:
    assert " ".join(column.name for column in COLLECTIVES) == (
        "collective payload size_bytes count dtype overlap seed iters warmup rounds device world_size threads hosts "
        "ranks_per_host uplink_bps downlink_bps link_trace latency_s jitter_s loss_ratio cpu_share cluster_digest "
        "measured_bandwidth_bps measured_rtt_s measured_loss_ratio forwarder_cpu_share wire_headers link_warnings "
        "time_p50_s time_p95_s algbw_Bps busbw_Bps "
        "num_wrong messages bytes_sent wire_bytes_sent of_limit "
        "host cpu torch_version kernels git_sha git_dirty started_at"
    )


def test_the_committed_page_is_what_the_columns_say() -> None:
    text = (REPOSITORY / PAGE).read_text(encoding="utf-8")
    assert text == document(), "run: python -m bench.extensions.microbenchmarks.columns"


def test_tensors_that_fit_into_no_memory_are_refused() -> None:
    answer = invoke("collectives", "--sizes", "1000GB", "--world-size", "4096", "--collectives", "native")
    assert answer.code == 2
    assert "do not fit into this machine's memory" in answer.error
