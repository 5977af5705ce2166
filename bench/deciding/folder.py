"""Write a decision to its folder, and read it back with the measurements that led to it."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from bench.core.errors import NothingToCompare
from bench.core.files import writing
from bench.core.run_folder import read_json, write_json
from bench.deciding.answer import Answer, LinkCheck, judge
from bench.deciding.decision import Evidence
from bench.deciding.load import Load
from bench.deciding.search import TRAJECTORIES, WHOLE_RUNS
from bench.deciding.step_times import LinkStepTimes
from bench.deciding.study import ANSWER, DecideConfig, Study, is_finished
from bench.deciding.trajectory import Trajectory, trajectory_of, without_load
from bench.report.page import Page, to_html
from bench.report.plots.style import applied, save
from bench.report.store import collect_runs
from bench.report.store import read as read_rows

REPORT = "decision.html"
# The runs and step times on which the decision rests.
EVIDENCE = "step-times/evidence.json"


def write(answer: Answer, page: Page) -> None:
    """Write `decision.json`, `decision.csv`, `decision.svg` and `decision.html` to the folder of a decision.

    Args:
        answer: the decision.
        page: the contents of its report.
    """
    import pandas as pd  # takes long

    folder = answer.folder
    with writing(folder / "decision.csv"):
        pd.DataFrame(answer.rows()).to_csv(folder / "decision.csv", index=False, lineterminator="\n")
    with applied():
        save(answer.picture(), folder / "decision.svg")
    with writing(folder / REPORT):
        (folder / REPORT).write_text(to_html(page), encoding="utf-8")
    evidence = {"next_seed_s": answer.next_seed_s, "methods": [_measured(each) for each in answer.evidence]}
    (folder / EVIDENCE).parent.mkdir(exist_ok=True)  # no steps were timed if only whole runs count
    write_json(folder / EVIDENCE, evidence)
    write_json(folder / ANSWER, answer.to_dict())


def _measured(evidence: Evidence) -> dict[str, Any]:
    return {
        "method": evidence.method,
        "trajectories": [each.run["run_id"] for each in evidence.trajectories],
        "step_times": evidence.step_times and dataclasses.asdict(evidence.step_times),
        "whole_runs": [each.run["run_id"] for each in evidence.whole_runs],
    }


def read(folder: Path) -> Answer:
    """Return the decision that is in a folder.

    Raises:
        UsageError: the folder holds no study.
        NothingToCompare: the study is not finished, or a file is missing or of another version.
    """
    study = Study.read(folder)
    if not is_finished(folder):
        raise NothingToCompare(f"the decision in {folder} is not finished; bench decide {folder} continues it")
    content, measured = read_json(folder / ANSWER) or {}, read_json(folder / EVIDENCE) or {}
    try:
        rule = DecideConfig(**content["rule"])
        target = content[study.quality.target_column]
        checks = [LinkCheck(**{k: v for k, v in each.items() if k != "deviation"}) for each in content["checks"]]
        evidence = [_evidence(each, folder, target, study) for each in measured["methods"]]
        return Answer(
            folder=folder,
            study=study,
            target=target,
            rule=rule,
            evidence=evidence,
            decisions=judge(evidence, rule, checks),
            checks=checks,
            faster_up_to={
                method: math.inf if rate is None else rate for method, rate in content["faster_up_to_bps"].items()
            },
            rates_tried=content["rates_tried_bps"],
            stopped=content["stopped"],
            next_seed_s=measured["next_seed_s"],
            warnings=content["warnings"],
            needs_idle_machine=content["needs_idle_machine"],
            load=Load(**content["other_cpu_share"]),
        )
    except (LookupError, TypeError) as error:
        raise NothingToCompare(
            f"the decision in {folder} is of another version, or a run is missing ({type(error).__name__}: {error}); "
            f"bench decide {folder} decides again with the runs that are there"
        ) from None


def _evidence(measured: dict[str, Any], folder: Path, target: float, study: Study) -> Evidence:
    def found(name: str) -> list[Trajectory]:
        places = (folder / TRAJECTORIES, folder / WHOLE_RUNS)
        paths = [path for each in measured[name] for place in places if (path := place / each).is_dir()]
        if len(paths) < len(measured[name]):
            raise LookupError(f"{len(measured[name]) - len(paths)} runs of {measured['method']}")
        return [trajectory_of(run, target) for run in collect_runs(read_rows(paths) if paths else [])]

    times, trajectories = measured["step_times"], found("trajectories")
    return Evidence(
        method=measured["method"],
        trajectories=trajectories if study.is_time_dependent else without_load(trajectories),
        step_times=LinkStepTimes(**times) if times else None,
        whole_runs=found("whole_runs"),
    )
