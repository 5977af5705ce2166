"""Define a study: the methods that `bench decide` compares, the runs that it needs, and the folder that keeps these."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le
from typing_extensions import Doc

from bench.core import registry, spec
from bench.core.config.configuration import Configuration, Flag, short_digest
from bench.core.config.run import MACHINES, VIRTUAL_HOSTS, RunConfig
from bench.core.errors import DIVERGED, Interrupted, UsageError
from bench.core.run_folder import RunFolder, read_json, write_json
from bench.launch.jobs.fork_server import ForkServer
from bench.launch.plan import place
from bench.launch.recipes import with_recipe
from bench.launch.run import execute, resume
from bench.launch.sweep_file import Settings, SweepFile, plan_runs, read_sweep, table_text
from bench.launch.sweep_state import PastRun, by_digest, past_runs, run_missing
from bench.report.quality import Metric, quality_of
from collectives.options import Spec

# Options that change the time of a run, but not its losses or parameters.
LINK_OPTIONS = frozenset(
    option.name for option in RunConfig.options() if option.flag and option.flag.panel in (VIRTUAL_HOSTS, MACHINES)
)
# Strategies whose losses depend on the time that messages take.
TIME_DEPENDENT = ("async_server", "elastic")
FILE, ANSWER = "study.json", "decision.json"
# The kinds of components that make a method.
METHOD_KINDS = ("compressors", "strategies", "optimizers")
# Options of `DecideConfig` that a study keeps; the other options limit the seeds and the time of one call.
RULE_OPTIONS = ("same", "alpha", "accuracy_margin")
# Matches spaces between components, but no spaces beside "," ":" or "=", which are inside a component.
_SPACES = re.compile(r"(?<![,:=\s])\s+(?![,:=\s])")


RULE = "Rule of the decision"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecideConfig(Configuration):
    """The rule by which methods are compared, and the limits on the number of seeds and the time."""

    panels: ClassVar[tuple[str, ...]] = (RULE,)

    same: Annotated[
        float, Ge(1), Le(2), Doc("times that differ by less than this factor count as equal"), Flag(RULE)
    ] = 1.03
    alpha: Annotated[
        float,
        Ge(0.0001),
        Le(0.5),
        Doc("probability that at least one verdict on time is wrong; the same holds for the verdicts on accuracy"),
        Flag(RULE),
    ] = 0.05
    accuracy_margin: Annotated[
        float,
        Ge(0),
        Le(100),
        Doc(
            "accepted loss of final accuracy, in percentage points; for a text, accepted increase of bits per byte, in "
            "per cent"
        ),
        Flag(RULE),
    ] = 1.0
    max_seeds: Annotated[int, Ge(1), Le(1000), Doc("largest number of seeds"), Flag(RULE)] = 20
    budget: Annotated[str, Doc("time after which no seed is added: 10min"), Flag(RULE, metavar="DURATION")] = "10min"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A method to compare: options of `bench run` that belong together.

    Attributes:
        name: short name, unique in the study.
        trajectory: complete configuration of a run without the emulated link; each run replaces the seed.
        on_link: complete configuration of a run on the link; the run ends at the target, unless the losses of a method
            depend on time.
    """

    name: str
    trajectory: RunConfig
    on_link: RunConfig

    @property
    def exchanges_alike(self) -> bool:
        """True if the method's steps send different bytes only because it does not exchange in every step."""
        if Spec.parse(self.trajectory.strategy).name != "local":
            return False
        from compressors.base import Compressor

        compressor: Compressor = spec.build("compressors", self.trajectory.filled["compressor"])
        return bool(self.trajectory.steps) or not compressor.traits.denser_epochs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A baseline and methods to compare with it, on one link.

    Attributes:
        base: options that all methods share, by name, including the link.
        methods: the options of each method, the baseline first.
        rule: the user's values for options of the rule (`RULE_OPTIONS`), by name; options not given are absent.
        first_seed: the first seed; the others follow it.
        limits: the user's values for the other options of `DecideConfig`, by name, for a repetition of the study.
    """

    base: Settings
    methods: list[Settings]
    rule: dict[str, Any]
    first_seed: int = 1
    limits: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def quality(self) -> Metric:
        """The measure of the trained models: bits per byte if the target is in bits per byte, otherwise accuracy."""
        return quality_of([with_recipe(self.base)])

    @property
    def digest(self) -> str:
        """Ten hex digits that identify the study; they do not depend on the link."""
        shared = {name: value for name, value in self.base.items() if name not in LINK_OPTIONS}
        return short_digest([shared, self.methods])

    def store(self, folder: Path) -> None:
        """Write the study to its folder."""
        write_json(folder / FILE, dataclasses.asdict(self))

    @classmethod
    def read(cls, folder: Path) -> "Study":
        """Read the study of a folder.

        Raises:
            UsageError: the folder holds no study.
        """
        try:
            return cls(**(read_json(folder / FILE) or {}))
        except TypeError:
            raise UsageError(f"{folder} holds no {FILE} of this version; give a folder of bench decide") from None

    def check(self) -> None:
        """Check that the options allow a decision.

        Raises:
            UsageError: an option ends trainings early, needs other machines, or must be the same for all methods.
        """
        for settings in (self.base, *self.methods):
            for name in ("steps", "stop_at_target"):
                if settings.get(name):
                    flag = f"--{name.replace('_', '-')}"
                    raise UsageError(f"a decision needs whole trainings of --epochs; leave out {flag}")
            if settings.get("nnodes", 1) > 1 or settings.get("node_rank") or settings.get("rdzv_endpoint"):
                raise UsageError(
                    "bench decide starts all ranks itself, so it cannot use several machines; measure step times there "
                    "with bench run, or describe the link with --hosts and --bandwidth"
                )
        if with_recipe(self.base).get(self.quality.target_column) is None:
            raise UsageError(
                "a decision needs a target; add --target-accuracy, such as 0.95, or --target-bits-per-byte for a text"
            )
        for settings in self.methods:
            if shared := settings.keys() & (LINK_OPTIONS | {"seed", "target_accuracy", "target_bits_per_byte"}):
                raise UsageError(f"all methods must share {', '.join(sorted(shared))}; give it once, for all")

    @property
    def is_time_dependent(self) -> bool:
        """True if times must be measured in whole runs on the link, not composed of step times.

        This is so if the losses of a method depend on time, for example because ranks may leave, or if its first steps
        are of another kind and cannot be timed separately.
        """
        strategies = [Spec.parse(str((self.base | settings).get("strategy"))) for settings in self.methods]
        return any(
            strategy.name in TIME_DEPENDENT
            or strategy.options.get("preset") == "post_local"
            or strategy.options.get("start_after", "0") != "0"
            or strategy.options.get("steps") == "auto"
            for strategy in strategies
        )

    def plan(self, server: ForkServer) -> list[Method]:
        """Return the methods with their complete configurations, the baseline first.

        Raises:
            UsageError: a configuration is impossible, or two methods are equal.
        """
        link = {name: value for name, value in self.base.items() if value is not None}
        ranks = place(RunConfig(**with_recipe(link | self.methods[0])))
        without = {name: value for name, value in link.items() if name not in LINK_OPTIONS}
        without |= {"world_size": ranks.world_size, "threads": ranks.threads, "device": ranks.device}
        trajectories = _configs(without, self.methods, server)
        on_link = trajectories if ranks.cluster is None else _configs(link, self.methods, server)
        if not self.is_time_dependent:  # otherwise only a whole run shows the final accuracy
            on_link = [dataclasses.replace(config, stop_at_target=True) for config in on_link]
        usual = on_link[0].optimizer
        names = short_names([(_what_is_sent(config, usual), config.collective) for config in on_link], self.methods)
        return [
            Method(name=name, trajectory=trajectory, on_link=config)
            for name, trajectory, config in zip(names, trajectories, on_link, strict=True)
        ]


def notes_of(methods: Sequence[Method]) -> list[str]:
    """Return the distinct notes of the methods' configurations.

    A note that only some methods have begins with the names of these methods.
    """
    having: dict[str, list[str]] = {}
    for method in methods:
        for note in method.trajectory.notes:
            having.setdefault(note, []).append(method.name)
    return [note if len(names) == len(methods) else f"{', '.join(names)}: {note}" for note, names in having.items()]


def _what_is_sent(config: RunConfig, usual_optimizer: str) -> str:
    """Return as text the strategy, optimizer and compressor of a method, without the usual ones among them.

    If all three are the usual ones, return the compressor.
    """
    parts = [
        *([config.strategy] if config.strategy != RunConfig.strategy else []),
        *([config.optimizer] if config.optimizer != usual_optimizer else []),
        *([config.compressor] if config.compressor != "none" else []),
    ]
    return " ".join(parts) or config.compressor


def _configs(base: Settings, methods: list[Settings], server: ForkServer) -> list[RunConfig]:
    runs = plan_runs(SweepFile(where="bench decide", base=base, include=methods), server)
    found = {table_text(run.settings): run.config for run in runs}
    if len(found) < len(methods):
        raise UsageError("two methods are equal; name each method once, and do not repeat the baseline")
    return [found[table_text(settings)] for settings in methods]


def short_names(components: Sequence[tuple[str, str]], methods: Sequence[Settings]) -> list[str]:
    """Return a unique name for each method.

    The names are the methods' components without options if these are unique; otherwise components with options, then
    also the collective, then all options of each method.

    Args:
        components: for each method, (its unusual components, separated by spaces; its collective).
        methods: the options of each method.
    """
    sent = [text for text, _ in components]
    bare = [" ".join(part.partition(":")[0] for part in text.split()) for text in sent]
    pairs = [" + ".join(pair) for pair in components]
    texts = list(map(table_text, methods))
    for names in (bare, sent, pairs):
        if len(set(names)) == len(names):
            return names
    return texts


def parse_method(text: str) -> Settings:
    """Return the options that a text such as "local:steps=30 topk:ratio=0.01@allgather" names.

    The text names a compressor, a strategy or an optimizer, or several of these, and optionally a collective.

    Raises:
        UsageError: the text has another form, a component is unknown, or two components are of one kind.
    """
    components, at, collective = (part.strip() for part in text.partition("@"))
    if not components or bool(at) != bool(collective) or len(_SPACES.split(collective)) > 1:
        raise UsageError(
            f"'{text}' is not a method; write a compressor, strategy or optimizer, or several with spaces, and the "
            "collective last, such as 'local topk@allgather'"
        )
    settings: Settings = {"collective": collective} if at else {}
    for component in _SPACES.split(components):
        name = spec.parse(component).name
        kind = next((kind for kind in METHOD_KINDS if name in registry.entries(kind)), None)
        if kind is None:
            raise registry.unknown(name, *METHOD_KINDS)
        option = registry.KINDS[kind].singular
        if option in settings:
            raise UsageError(f"'{text}' names two {kind}, {settings[option]} and {component}; a method has one")
        settings[option] = component
    return settings


def read_methods(path: Path) -> tuple[Settings, list[Settings]]:
    """Return the shared options and the methods of a TOML file, which is written like a sweep file.

    Raises:
        UsageError: the file is not written like a sweep file, or it names seeds, which `bench decide` chooses itself.
    """
    sweep = read_sweep(path)
    if sweep.seeds:
        raise UsageError(f"{path} names seeds, but bench decide adds seeds until the answer is clear; remove them")
    return sweep.base, sweep.configurations()


# Runs.


def train_missing(
    configs: Sequence[RunConfig],
    out: Path,
    server: ForkServer,
    on_progress: Callable[[RunConfig, dict[str, Any]], None],
) -> bool:
    """Train the runs that are not in the folder yet, in the given order; resume interrupted and failed runs.

    A run whose training diverged is not repeated, because it would diverge again.

    Args:
        configs: complete configurations of the runs.
        out: folder of the runs.
        server: starts the ranks.
        on_progress: called with a run's configuration and each report of its rank 0.

    Returns:
        True if any run was missing before this call.

    Raises:
        Interrupted: the user stopped a run.
    """

    def train(config: RunConfig, begun: RunFolder | None) -> None:
        def report(line: dict[str, Any]) -> None:
            on_progress(config, line)

        if begun is None:
            result = execute(config, out, report, server)
        else:
            result = resume(begun, report, server, config)
        if result.status == "interrupted":
            raise Interrupted("stopped by the user")

    seen = by_digest(past_runs(out))
    missing = [config for config in configs if _is_missing(seen.get(config.digest))]
    run_missing(missing, out, seen, train)
    return bool(missing)


def _is_missing(past: PastRun | None) -> bool:
    if past is None or past.state == "torn":
        return True
    return past.state == "failed" and past.summary.get("error_kind") != DIVERGED


def is_finished(folder: Path) -> bool:
    """Return True if a folder holds an answer for the methods and the link in its `study.json`."""
    study, answer = (read_json(folder / name) or {} for name in (FILE, ANSWER))
    return bool(answer) and all(answer.get(name) == study.get(name) for name in ("base", "methods"))
