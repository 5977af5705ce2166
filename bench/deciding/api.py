"""`bench.decide`, which answers whether compression makes training finish sooner on a link."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.api.keywords import by_option_name, keywords_of, takes_options
from bench.api.progress import LiveLine
from bench.core.config.run import MAX_SEED, RunConfig
from bench.core.errors import Interrupted, UsageError
from bench.core.run_folder import RUNS_FOLDER
from bench.core.units import parse_duration
from bench.deciding.answer import Answer
from bench.deciding.folder import write
from bench.deciding.page import page_of
from bench.deciding.search import Search
from bench.deciding.study import LINK_OPTIONS, RULE_OPTIONS, DecideConfig, Study, notes_of, parse_method, read_methods
from bench.launch.jobs.failure import clear_away
from bench.launch.jobs.fork_server import TRAIN, ForkServer
from bench.launch.recipes import with_recipe

# A method as a user writes it: a text such as "local:steps=5 topk@allgather", or options of `bench run` by name.
MethodSpec = str | Mapping[str, Any]
BASELINE = "bf16"
# Options of `bench run` that are always refused, with a sentence that says what to do instead.
NOT_TAKEN = ("compressor", "collective", "steps", "stop_at_target", "nnodes", "node_rank", "rdzv_endpoint")
NOTHING_TO_COMPARE = "there is nothing to compare; give --method at least once, such as --method topk"
_OWN = keywords_of(DecideConfig)


@takes_options(DecideConfig, RunConfig)
def decide(
    methods: MethodSpec | Sequence[MethodSpec] = (),
    *,
    source: str | Path | None = None,
    baseline: MethodSpec | None = None,
    out: str | Path | None = None,
    quiet: bool = False,
    **options: Any,
) -> Answer:
    """Decide like `bench decide` whether compression makes training finish sooner on a link.

    Args:
        methods: what to compare with the baseline: texts such as ``topk:ratio=0.01@allgather`` or
            ``local:steps=30 topk``, or options that belong together, such as ``{"compressor": "topk", "lr": 0.1}``. A
            single text is one method.
        source: TOML file of methods; or the folder of an earlier decision, to decide for another link.
        baseline: the method that the others are compared with, ``bf16`` by default.
        out: folder of the study; by default ``results/runs/decide-<digest of the options>``. If a study was interrupted
            in this folder, it continues.
        quiet: print no progress and no notes on stderr.
        options: the other options of `bench decide`, with underscores: options of `DecideConfig`, such as
            ``max_seeds=5``, and options of `bench run` for all methods. `target_accuracy` or, for a text,
            `target_bits_per_byte` is required.

    Raises:
        UsageError: an option is unknown or not possible, or there is nothing to compare.
        NothingToCompare: the baseline never reached the target.
        RunFailed: a run failed for another reason than divergence.
        Interrupted: the user pressed Ctrl-C; the same call continues the study.
    """
    own = {keyword: options.pop(keyword) for keyword in _OWN.keys() & options}
    asked = DecideConfig(**own)
    rule = {name: getattr(asked, name) for name in RULE_OPTIONS if name in own}
    given = by_option_name(options, decide)
    earlier = Path(source) if source is not None and Path(source).is_dir() else None
    study = _study(methods, baseline, source, earlier, rule, given)
    if limits := {name: getattr(asked, name) for name in own if name not in RULE_OPTIONS}:
        study = dataclasses.replace(study, limits=limits)
    study.check()
    folder = Path(out or earlier or RUNS_FOLDER / f"decide-{study.digest}")
    ends_at = time.monotonic() + parse_duration(asked.budget)
    clear_away()
    with ForkServer(TRAIN) as server, LiveLine("bench decide", quiet=quiet) as live:
        planned = study.plan(server)
        for note in notes_of(planned):
            live.say(f"note: {note}")
        search = Search(
            study=study,
            methods=planned,
            folder=folder,
            server=server,
            live=live,
            ends_at=ends_at,
            checks=not (earlier and given.keys() & LINK_OPTIONS),
        )
        try:
            answer = search.run(range(study.first_seed, min(study.first_seed + asked.max_seeds, MAX_SEED + 1)))
        except Interrupted:
            raise Interrupted("stopped by the user; the same command continues") from None
    write(answer, page_of(answer))
    return answer


def _study(
    methods: MethodSpec | Sequence[MethodSpec],
    baseline: MethodSpec | None,
    source: str | Path | None,
    earlier: Path | None,
    rule: dict[str, float],
    given: dict[str, Any],
) -> Study:
    # Return the study of an earlier folder, with the link that the user gave; or a new study.
    if "compressor" in given or "collective" in given:
        raise UsageError("bench decide takes methods; write --method and --baseline instead, as in --method topk@ring")
    given = dict(given)
    first_seed = given.pop("seed", None)
    if earlier is not None:
        if methods or baseline:
            raise UsageError(f"{earlier} already has its methods; leave out --method and --baseline, or the folder")
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
    listed = [methods] if isinstance(methods, str | Mapping) else methods
    candidates = [*map(_settings, listed), *of_file]
    if not candidates:
        raise UsageError(NOTHING_TO_COMPARE)
    base = shared | given
    return Study(
        base=base if "eval_every" in with_recipe(base) else {"eval_every": 0.25} | base,
        methods=[_settings(baseline or BASELINE), *candidates],
        rule=rule,
        first_seed=RunConfig.seed if first_seed is None else first_seed,
    )


def _settings(method: MethodSpec) -> dict[str, Any]:
    return parse_method(method) if isinstance(method, str) else by_option_name(method, decide)
