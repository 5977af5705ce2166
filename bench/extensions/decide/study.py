"""Studies: the methods that a `bench decide` compares, the runs that it needs, and the folder that keeps them."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.core.config.configuration import short_digest
from bench.core.config.run import MACHINES, VIRTUAL_HOSTS, RunConfig
from bench.core.errors import Interrupted, UsageError
from bench.core.run_folder import RunFolder, read_json, write_json
from bench.launch.jobs.fork_server import ForkServer
from bench.launch.resolve import place
from bench.launch.run import execute, resume
from bench.launch.sweep_file import Settings, SweepFile, plan_runs, read_sweep, table_text
from bench.launch.sweep_state import by_digest, past_runs, run_missing

# Options that change the time of a run but none of its numbers.
LINK_OPTIONS = frozenset(
    option.name for option in RunConfig.options() if option.flag and option.flag.panel in (VIRTUAL_HOSTS, MACHINES)
)
# Strategies whose numbers depend on the time that messages take.
TIME_DEPENDENT = ("async_server",)
FILE = "study.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A method to compare: options of `bench run` that belong together.

    Attributes:
        name: short name, unique in the study.
        settings: the options in which methods differ.
        trajectory: complete configuration of a run without the emulated link; its seed is replaced.
        on_link: complete configuration of a run on the link, which ends at the target.
    """

    name: str
    settings: Settings
    trajectory: RunConfig
    on_link: RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A baseline and methods to compare with it, on one link.

    Attributes:
        base: options that all methods share, by name, including the link.
        methods: the options of each method, the baseline first.
    """

    base: Settings
    methods: list[Settings]

    @property
    def digest(self) -> str:
        """Ten hex digits that identify the study apart from the link."""
        shared = {name: value for name, value in self.base.items() if name not in LINK_OPTIONS}
        return short_digest([shared, self.methods])

    def store(self, folder: Path) -> None:
        """Write the study to its folder."""
        write_json(folder / FILE, {"base": self.base, "methods": self.methods})

    @classmethod
    def read(cls, folder: Path) -> "Study":
        """Read the study of a folder.

        Raises:
            UsageError: the folder holds no study.
        """
        stored = read_json(folder / FILE)
        if stored is None:
            raise UsageError(f"{folder} holds no {FILE}; give a folder that bench decide has written")
        return cls(base=stored["base"], methods=stored["methods"])

    def plan(self, server: ForkServer) -> list[Method]:
        """Return the methods with their complete configurations, the baseline first.

        Raises:
            UsageError: a configuration is impossible, or two methods are equal.
        """
        link = {name: value for name, value in self.base.items() if value is not None}
        ranks = place(RunConfig(**link | self.methods[0]))
        without = {name: value for name, value in link.items() if name not in LINK_OPTIONS}
        without |= {"world_size": ranks.world_size, "threads": ranks.threads, "device": ranks.device}
        trajectories = _configs(without, self.methods, server)
        if ranks.cluster is not None:
            on_link = _configs(link | {"stop_at_target": True}, self.methods, server)
        else:
            on_link = [dataclasses.replace(config, stop_at_target=True) for config in trajectories]
        names = short_names([(config.compressor, config.collective) for config in on_link], self.methods)
        return [
            Method(name=name, settings=settings, trajectory=trajectory, on_link=config)
            for name, settings, trajectory, config in zip(names, self.methods, trajectories, on_link, strict=True)
        ]


def _configs(base: Settings, methods: list[Settings], server: ForkServer) -> list[RunConfig]:
    runs = plan_runs(SweepFile(where="bench decide", base=base, include=methods), server)
    found = {table_text(run.settings): run.config for run in runs}
    if len(found) < len(methods):
        raise UsageError("two methods are equal; name each method once, and do not repeat the baseline")
    return [found[table_text(settings)] for settings in methods]


def short_names(components: Sequence[tuple[str, str]], methods: Sequence[Settings]) -> list[str]:
    """Return a unique name for each method: its compressor, with its options or its collective if needed, or all."""
    compressors = [compressor for compressor, _ in components]
    bare = [compressor.partition(":")[0] for compressor in compressors]
    pairs = [" + ".join(pair) for pair in components]
    texts = list(map(table_text, methods))
    for names in (bare, compressors, pairs):
        if len(set(names)) == len(names):
            return names
    return texts


def parse_method(text: str) -> Settings:
    """Return the options that a text such as "topk:ratio=0.01@allgather" names: a compressor, and a collective."""
    compressor, at, collective = text.partition("@")
    if not compressor.strip() or (at and not collective.strip()):
        raise UsageError(f"'{text}' is not a method; write COMPRESSOR or COMPRESSOR@COLLECTIVE, such as topk@allgather")
    return {"compressor": compressor.strip()} | ({"collective": collective.strip()} if at else {})


def read_methods(path: Path) -> tuple[Settings, list[Settings]]:
    """Return the shared options and the methods of a TOML file, which is written like a sweep file.

    Raises:
        UsageError: the file is not such a file, or it names seeds, which `bench decide` chooses itself.
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
) -> None:
    """Train the runs that are not in the folder yet, in this order; resume those that were interrupted.

    Args:
        configs: complete configurations of the runs.
        out: folder of the runs.
        server: starts the ranks.
        on_progress: called with a run's configuration and each report of its rank 0.

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
    missing = [config for config in configs if config.digest not in seen or seen[config.digest].state == "torn"]
    run_missing(missing, out, seen, train)
