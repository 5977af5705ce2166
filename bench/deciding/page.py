"""The report of a decision: answer, pictures, tables, link, machine and commands, laid out as for runs."""

import shlex
from typing import Any

from bench.core.run_folder import read_json
from bench.deciding.answer import Answer, link_in_words
from bench.deciding.decision import seeds_in_words
from bench.deciding.pictures import pictures_of
from bench.deciding.search import TRAJECTORIES, WHOLE_RUNS
from bench.deciding.tables import check_table, decision_table, link_table, step_table
from bench.launch.recipes import with_recipe
from bench.report.columns import format_number
from bench.report.page import Page, Section, environments, machines_of, question
from bench.report.plots.style import inline_svg


def page_of(answer: Answer) -> Page:
    """Return the contents of the report of a decision."""
    trained = [each.run for evidence in answer.evidence for each in (*evidence.trajectories, *evidence.whole_runs)]
    runs = list({run["run_id"]: run for run in trained}.values())  # if only whole runs count, they are the trajectories
    pictures = {name: (inline_svg(each, name), text) for name, (each, text) in pictures_of(answer).items()}
    folders = [answer.folder / place / run["run_id"] for place in (TRAJECTORIES, WHOLE_RUNS) for run in runs]
    versions, commands, unread = environments(
        [file for each in folders if (file := each / "environment.json").is_file()]
    )
    link = _link(answer)
    table = decision_table(answer)
    tables = [table, check_table(answer), step_table(answer), link_table(link.get("flows", []))]
    quality, (model, dataset) = answer.baseline.quality, answer.workload
    folder = shlex.quote(str(answer.folder))
    return Page(
        question=question(model, dataset, f"this link ({link_in_words(answer.study.base)})", quality),
        sections=[
            Section(
                label="",
                answer=answer.sentences[0],
                evidence=[*answer.sentences[1:], *table.notes[2:]],
                shared=_shared(answer),
                tables=[each for each in tables if each.rows],
                caveats=answer.warnings,
                figures=[pictures.pop("decision")],
            )
        ],
        figures=list(pictures.values()),
        not_drawn=[],
        caveats=[*answer.warnings, *link.get("warnings", []), *unread],
        machines=machines_of(runs),
        versions=versions,
        commands=[
            *commands,
            f"bench decide {folder}  # decides again with what the folder holds",
            f"bench run --again {folder}  # trains and measures everything again, in a new folder",
        ],
        reading=_reading(answer),
    )


def _reading(answer: Answer) -> str:
    rule, quality = answer.rule, answer.baseline.quality
    seeds = max(len(each.times) for each in answer.evidence)
    sure = f"{format_number(100 * (1 - rule.alpha))} %"
    return (
        f"Up to {seeds_in_words(seeds)} per method. With a probability of {sure}, no method is wrongly called faster "
        "or slower. Brackets are intervals that stay valid although results were looked at after every seed. Times "
        f"within {format_number(rule.same)}x are the same. A loss of {quality.noun} of up to "
        f"{quality.amount(format_number(rule.accuracy_margin))} is accepted (within); open: not decided yet."
    )


def _shared(answer: Answer) -> dict[str, str]:
    base = with_recipe(answer.study.base)
    return {name: str(value) for name, value in base.items() if value is not None}


def _link(answer: Answer) -> dict[str, Any]:
    """Return the content of the `link.json` of a whole run on the decision's link; empty if there is none."""
    whole_runs = [each.run_id for each in answer.checks] + [each.run["run_id"] for each in answer.baseline.whole_runs]
    found = (read_json(answer.folder / WHOLE_RUNS / each / "link.json") for each in whole_runs)
    return next(filter(None, found), {})
