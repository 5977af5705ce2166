"""`bench.decide`, which answers whether compression makes training finish sooner on a link, for Python and the command.

What takes long to import is imported when the function is called, because `bench --help` imports the command.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from bench.api.frames import frame
from bench.api.keywords import by_option_name, takes_options
from bench.api.progress import LiveLine
from bench.core.config.run import MAX_SEED, RunConfig
from bench.core.errors import Interrupted, UsageError
from bench.core.run_folder import RUNS_FOLDER
from bench.core.units import parse_duration

if TYPE_CHECKING:
    import pandas as pd

    from bench.api import run_options
    from bench.extensions.decide.search import StudyResult
    from bench.extensions.decide.study import Study

Method = str | Mapping[str, Any]
NOTHING_TO_COMPARE = "there is nothing to compare; give --method at least once, such as --method topk"
# Options of `bench run` that are always refused, with a sentence that says what to do instead.
NOT_TAKEN = ("compressor", "collective", "steps", "stop_at_target", "nnodes", "node_rank", "rdzv_endpoint")
# Smallest and largest value.
SAME, ALPHA, ACCURACY_MARGIN, MAX_SEEDS = (1.0, 2.0), (0.0001, 0.5), (0.0, 100.0), (1, 1000)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """The answer of `decide`.

    Attributes:
        folder: the study's folder, with ``decision.json`` and everything that was measured.
        result: the decision about every method, with the measurements that led to it.
    """

    folder: Path
    result: StudyResult = dataclasses.field(repr=False)

    @property
    def sentences(self) -> list[str]:
        """The answer in a few sentences, the first of which starts with Yes, No or Open."""
        from bench.extensions.decide.output import sentences

        return sentences(self.result)

    @property
    def warnings(self) -> list[str]:
        """Sentences about results that should not be trusted."""
        return self.result.warnings

    @property
    def methods(self) -> pd.DataFrame:
        """One row per method except the baseline: verdict, factor with its interval, and change of accuracy.

        For a text, the change of bits per byte takes the place of that of accuracy.
        """
        rows = self.to_dict()["decisions"]
        types = {"method": str, "num_seeds": int, "num_missed": int}
        return frame(rows, {name: str if name.endswith("verdict") else types.get(name, float) for name in rows[0]})

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``decision.json``."""
        from bench.extensions.decide.output import to_dict

        return to_dict(self.result)

    def __str__(self) -> str:
        """Return the sentences, and the warnings below them."""
        return "\n".join([*self.sentences, *(f"warning: {sentence}" for sentence in self.warnings)])


@takes_options
def decide(
    methods: Sequence[Method] = (),
    *,
    source: str | Path | None = None,
    baseline: Method | None = None,
    same: float | None = None,
    alpha: float | None = None,
    accuracy_margin: float | None = None,
    max_seeds: int = 20,
    budget: str = "10min",
    out: str | Path | None = None,
    quiet: bool = False,
    **options: Unpack[run_options.RunOptions],
) -> Answer:
    """Decide like `bench decide` whether compression makes training finish sooner on a link.

    Args:
        methods: what to compare with the baseline: texts such as ``topk:ratio=0.01@allgather`` or
            ``local:steps=30 topk``, or options that belong together, such as ``{"compressor": "topk", "lr": 0.1}``. A
            single text is one method.
        source: TOML file of methods; or the folder of an earlier decision, to decide for another link.
        baseline: what the methods are compared with, ``bf16`` by default.
        same: factors of time below this make no practical difference; 1.03 by default.
        alpha: probability of a wrong verdict on time, all methods together; 0.05 by default.
        accuracy_margin: loss of final accuracy that is accepted, in percentage points; or increase of a text's bits per
            byte, in per cent; 1 by default.
        max_seeds: largest number of seeds.
        budget: time after which no seed is added.
        out: folder of the study; by default ``results/runs/decide-<digest of the options>``. A study that was
            interrupted there continues.
        quiet: print no progress and no notes on stderr.
        options: options of `bench run` for all methods, with underscores; `target_accuracy` is required or, for a
            text, `target_bits_per_byte`.

    Raises:
        UsageError: an option is unknown or not possible, or there is nothing to compare.
        NothingToCompare: the baseline never reached the target.
        RunFailed: a run failed for another reason than divergence.
        Interrupted: the user pressed Ctrl-C; the same call continues.
    """
    from bench.extensions.decide.decision import DecisionRule
    from bench.extensions.decide.output import write_files
    from bench.extensions.decide.search import Search
    from bench.extensions.decide.study import LINK_OPTIONS, notes_of
    from bench.launch.jobs.failure import clear_away
    from bench.launch.jobs.fork_server import TRAIN, ForkServer

    _check("same", same, SAME)
    _check("alpha", alpha, ALPHA)
    _check("accuracy_margin", accuracy_margin, ACCURACY_MARGIN)
    _check("max_seeds", max_seeds, MAX_SEEDS)
    given = by_option_name(options, decide)
    margin = None if accuracy_margin is None else accuracy_margin / 100.0
    asked = {"alpha": alpha, "same": same, "accuracy_margin": margin}
    rule = {name: value for name, value in asked.items() if value is not None}
    earlier = Path(source) if source is not None and Path(source).is_dir() else None
    study = _study(methods, baseline, source, earlier, rule, given)
    study.check()
    folder = Path(out or earlier or RUNS_FOLDER / f"decide-{study.digest}")
    ends_at = time.monotonic() + parse_duration(budget)
    clear_away()
    with ForkServer(TRAIN) as server, LiveLine("bench decide", quiet=quiet) as live:
        planned = study.plan(server)
        for note in notes_of(planned):
            live.say(f"note: {note}")
        search = Search(
            study=study,
            methods=planned,
            rule=DecisionRule(**study.rule, num_candidates=len(study.methods) - 1),
            folder=folder,
            server=server,
            live=live,
            ends_at=ends_at,
            checks=not (earlier and given.keys() & LINK_OPTIONS),
        )
        try:
            result = search.run(range(study.first_seed, min(study.first_seed + max_seeds, MAX_SEED + 1)))
        except Interrupted:
            raise Interrupted("stopped by the user; the same command continues") from None
    write_files(result, folder)
    return Answer(folder=folder, result=result)


def _study(
    methods: Sequence[Method],
    baseline: Method | None,
    source: str | Path | None,
    earlier: Path | None,
    rule: dict[str, float],
    given: dict[str, Any],
) -> Study:
    # The study of an earlier folder, asked for another link; or a new one.
    from bench.extensions.decide.study import LINK_OPTIONS, Study, read_methods

    if "compressor" in given or "collective" in given:
        raise UsageError("bench decide takes methods; write --method and --baseline instead, as in --method topk@ring")
    given = dict(given)
    first_seed = given.pop("seed", None)
    if earlier is not None:
        if methods or baseline:
            raise UsageError(f"{earlier} has its methods; leave out --method and --baseline, or the folder")
        study = Study.read(earlier)
        kept = set() if "cluster_file" in given else {"hosts", "ranks_per_host"}
        replaced = LINK_OPTIONS - kept if given.keys() & LINK_OPTIONS else ()
        return dataclasses.replace(
            study,
            base={name: value for name, value in study.base.items() if name not in replaced} | given,
            rule=study.rule | rule,
            first_seed=study.first_seed if first_seed is None else first_seed,
        )
    shared, of_file = ({}, []) if source is None else read_methods(Path(source))
    candidates = [*map(_settings, [methods] if isinstance(methods, str) else methods), *of_file]
    if not candidates:
        raise UsageError(NOTHING_TO_COMPARE)
    from bench.launch.recipes import with_recipe

    base = shared | given
    return Study(
        base=base if "eval_every" in with_recipe(base) else {"eval_every": 0.25} | base,
        methods=[_settings(baseline or "bf16"), *candidates],
        rule={"alpha": 0.05, "same": 1.03, "accuracy_margin": 0.01} | rule,
        first_seed=RunConfig.seed if first_seed is None else first_seed,
    )


def _settings(method: Method) -> dict[str, Any]:
    from bench.extensions.decide.study import parse_method

    return parse_method(method) if isinstance(method, str) else by_option_name(method, decide)


def _check(name: str, value: float | None, limits: tuple[float, float]) -> None:
    if value is not None and not limits[0] <= value <= limits[1]:
        raise UsageError(f"--{name.replace('_', '-')} {value} is not possible; give {limits[0]} to {limits[1]}")
