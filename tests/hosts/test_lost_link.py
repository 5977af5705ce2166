"""A host whose link goes down in the middle of a run: real frames stop, nothing tells the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.core.run_folder import read_json
from bench.launch import plan, run, torchrun
from bench.launch.hosts import HostsJob
from bench.launch.request import Request
from bench.launch.run import Result
from tests.cli.invoke import rows

NUM_HOSTS = 4


def run_and_cut(host: int, out: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Result:
    """Train on four hosts and take one off the network at the second evaluation."""
    jobs: list[HostsJob] = []
    start = torchrun.launch

    def launch(*arguments: Any) -> Any:
        jobs.append(start(*arguments))  # type: ignore[arg-type]
        return jobs[-1]

    def cut(line: dict[str, Any]) -> None:
        if line.get("evaluated", {}).get("step") == 40:
            jobs[0].set_link(host, up=False)

    monkeypatch.setattr(torchrun, "launch", launch)
    request = Request(
        model="linear", dataset="synthetic", train_size=512, test_size=64, batch_size=8, steps=100_000, eval_every=20,
        hosts=NUM_HOSTS, bandwidth="100mbit", timeout_s=6.0, **options,
    )  # fmt: skip
    return run.execute(plan.plan(request), out, cut)


def said(result: Result) -> dict[int, tuple[str, int | None]]:
    """(message, lost rank) by rank."""
    reports = [read_json(result.folder.error_of(rank)) for rank in range(NUM_HOSTS)]
    return {report["rank"]: (report["message"], report["lost_rank"]) for report in reports if report}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("host", "options"),
    [
        (2, {"compressor": "topk", "collective": "ring"}),
        (3, {"collective": "native"}),
        (0, {"collective": "tree"}),  # the rendezvous store goes with it
    ],
    ids=lambda value: str(value) if isinstance(value, int) else value["collective"],
)
def test_all_others_name_the_lost_host_and_it_knows_itself_cut_off(
    host: int, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_and_cut(host, tmp_path, monkeypatch, **options)
    assert result.status == "failed"
    assert f"lost rank {host}, which does not answer any more" in result.error
    by_rank = said(result)
    assert {rank: lost for rank, (_, lost) in by_rank.items() if rank != host} == dict.fromkeys(
        set(range(NUM_HOSTS)) - {host}, host
    )
    assert f"rank {host} lost all other ranks" in by_rank[host][0]
    kept = rows(result.folder.path)
    assert [row["step"] for row in kept[:2]] == ["20", "40"]
    assert kept[-1]["status"] == "failed"
