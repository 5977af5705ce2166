"""Select runs by conditions (option ``--where``), and group them by workload or into the rows of a comparison."""

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from bench.core import registry
from bench.core.columns import from_cell
from bench.core.errors import NothingToCompare, UsageError
from bench.core.schema import METRICS, METRICS_BY_NAME
from bench.report.columns import NOTHING, find_column, format_value
from bench.report.quality import Metric, quality_of
from bench.report.statistics import MeanEstimate, estimate
from bench.report.store import Row, Run, collect_runs, grouped
from collectives.options import Spec

# Settings that define the work; all other settings define the method.
WORKLOAD = (
    "model", "dataset", "train_size", "test_size", "holdout_size", "batch_size", "epochs", "steps", "target_accuracy",
    "target_bits_per_byte", "partition", "world_size", "hosts", "ranks_per_host", "replicas", "device", "threads",
    "uplink_bps", "downlink_bps", "link_trace", "latency_s", "jitter_s", "loss_ratio", "cpu_share", "cluster_digest",
    "straggler",
)  # fmt: skip

_NO_SETTING = {"run_id", "digest", "config_id", "name", "recipe", "seed", "rates_tried"}
# Columns that say how a run was set up, except the seed and labels.
SETTINGS = [column.name for column in METRICS if column.group == "identity" and column.name not in _NO_SETTING]

_ALWAYS = ("compressor", "collective")
COMPONENTS = (*_ALWAYS, "strategy")
DENSE = ("none", "bf16", "fp16", "torch_bf16", "torch_fp16")  # compressors that send every element in 16 or 32 bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunGroup:
    """The runs of one row of a comparison: all of one configuration or, with option ``--by``, all of one group.

    Attributes:
        label: this row's value in each column in which rows of the comparison may differ, by the column's name.
        named_by: names of the columns that suffice to distinguish the rows; `title` shows only these. None stands for
            all columns of `label`.
        short: the shortest name of this row that no other row has, such as ``topk``.
        runs: the runs; if a run was repeated with the same seed, only the one that ``store.one_per_seed`` chooses.
    """

    label: dict[str, Any]
    named_by: Sequence[str] | None = None
    short: str = ""
    runs: list[Run]

    @property
    def title(self) -> str:
        """A name that distinguishes this row from the others, such as ``topk:ratio=0.01 + allgather, lr=0.1``."""
        needed = self.named_by
        return name_of(self.label, self.label if needed is None or set(needed) - self.label.keys() else needed)

    @functools.cached_property
    def ok(self) -> list[Run]:
        """The successful runs; means, intervals and verdicts are computed from these only."""
        return [run for run in self.runs if run.ended_well]

    @functools.cached_property
    def diverged(self) -> list[Run]:
        """The runs whose training diverged; they have no final accuracy."""
        return [run for run in self.runs if run.diverged]

    @functools.cached_property
    def quality(self) -> Metric:
        """The measure of these runs' models: accuracy or bits per byte."""
        return quality_of(run.last_known for run in self.runs)

    @property
    def is_dense(self) -> bool:
        """True if no run compresses: all send every element of the gradients in 16 or 32 bits."""
        return all(run["compressor"].partition(":")[0] in DENSE for run in self.runs)

    def runs_with(self, column: str) -> list[Run]:
        """Return the successful runs whose value of a column is known.

        In column ``exposed_s`` (the exchange that does not overlap with backward), a value above the run's
        ``step_time_s`` counts as unknown, because the two timers contradict each other. Rows of older versions contain
        such values.
        """
        known = [run for run in self.ok if run[column] is not None]
        if column == "exposed_s":
            known = [run for run in known if run["step_time_s"] is None or run[column] <= run["step_time_s"]]
        return known

    def values(self, column: str) -> list[float]:
        """Return the known values of a column, at most one per successful run."""
        return [float(run[column]) for run in self.runs_with(column)]

    def estimate(self, column: str) -> MeanEstimate | None:
        """Return the mean of a column over seeds with its 95 % interval, or None if no seed has a value."""
        return estimate(self.values(column))

    def distinct(self, column: str) -> list[Any]:
        """Return the distinct known values of a column over all runs, in order of appearance."""
        return [value for value in dict.fromkeys(run[column] for run in self.runs) if value is not None]


def group_runs(runs: Sequence[Run], by: Sequence[str] = ()) -> list[RunGroup]:
    """Group runs into the rows of a comparison, in order of appearance.

    Args:
        runs: one run per configuration and seed.
        by: names of columns; runs with equal values in all of them form one group. If empty, runs with the same
            ``config_id`` form one group. Its label then has the compressor, the collective and every setting that
            differs between runs; it also has the strategy if any run uses another strategy than the default.
    """
    groups = list(grouped(runs, lambda run: tuple(run[name] for name in by or ["config_id"])).values())
    names = by or _label_columns(runs, groups)
    labels = [{name: group[0][name] for name in names} for group in groups]
    needed = by or _distinguishing(labels, names, always=COMPONENTS)
    named = zip(labels, _short_names(labels, needed), groups, strict=True)
    return [RunGroup(label=label, named_by=needed, short=short, runs=group) for label, short, group in named]


def _label_columns(runs: Sequence[Run], groups: Sequence[list[Run]]) -> list[str]:
    # Return the columns that distinguish the groups; if settings do not suffice, also the name or ``config_id``.
    unusual = {run["strategy"] for run in runs} - {METRICS_BY_NAME["strategy"].absent, None}
    always = COMPONENTS if unusual else _ALWAYS
    names = [*always, *(name for name in SETTINGS if name not in always and len({run[name] for run in runs}) > 1)]
    for last_resort in ("name", "config_id"):
        if len({tuple(group[0][name] for name in names) for group in groups}) == len(groups):
            break
        if len({run[last_resort] for run in runs}) > 1:
            names.append(last_resort)
    return names


def _distinguishing(
    records: Sequence[Mapping[str, Any] | Run], names: Iterable[str], always: Collection[str] = ()
) -> list[str]:
    # Return the names in ``always``, and each name that tells apart some records that agree in all earlier names.
    needed: list[str] = []
    num_apart = 1
    for name in names:
        apart = len({tuple(record[each] for each in (*needed, name)) for record in records})
        if name in always or apart > num_apart:
            needed.append(name)
            num_apart = apart
    return needed


def name_of(label: Mapping[str, Any], names: Iterable[str], *, with_options: bool = True) -> str:
    """Return a name made of a label's values, such as ``topk:ratio=0.01 + allgather, lr=0.1``.

    Args:
        label: value by the column's name.
        names: the columns to include.
        with_options: if False, components are named without their options, as in ``topk + allgather``.
    """
    values = {name: format_value(name, label[name]) for name in names}
    specs = " + ".join(
        value if with_options else Spec.parse(value).label for name, value in values.items() if name in COMPONENTS
    )
    others = [f"{name}={value}" for name, value in values.items() if name not in COMPONENTS]
    return ", ".join([specs, *others] if specs else others)


def _short_names(labels: Sequence[Mapping[str, Any]], needed: Sequence[str]) -> list[str]:
    # Return a short unique name for each label. Names are tried in this order: compressor, components, settings, all.
    settings = [name for name in needed if name not in COMPONENTS]
    components = [name for name in needed if name in COMPONENTS]
    varied = [name for name in components if len({label[name] for label in labels}) > 1]
    choices = (components[:1], components, [] if varied else settings, [*components[:1], *settings], needed)
    forms = [[name_of(label, names, with_options=False) for label in labels] for names in choices]
    forms.append([name_of(label, needed) for label in labels])
    return [
        next((form[i] for form in forms if form[i] and form.count(form[i]) == 1), forms[-1][i])
        for i in range(len(labels))
    ]


def by_workload(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Group rows by workload: by the settings in `WORKLOAD`, such as model, data set and links.

    All rows of a run belong to the workload of its last row.

    Returns:
        For each workload, in order of appearance, a tuple (label, rows). The label has the settings that distinguish
        this workload from the others, such as ``dataset=digits, world_size=4``; it is empty if there is only one
        workload.
    """
    runs = collect_runs(rows)
    workloads = grouped(runs, lambda run: tuple(run[name] for name in WORKLOAD)).values()
    names = _distinguishing(runs, WORKLOAD)
    return [
        (
            ", ".join(f"{name}={format_value(name, group[0][name])}" for name in names),
            [row for run in group for row in run.rows],
        )
        for group in workloads
    ]


# Names that are both a column of metrics.csv and an option of some component.
ALSO_OPTIONS = {
    "clip_norm", "collective", "error", "seed", "steps", "test_size", "train_size", "warmup_epochs", "warmup_steps",
}  # fmt: skip


# A column and the value that a run must have in it; None means an empty cell. A component's name without options
# matches the component with any options.
Condition = tuple[str, Any]


def parse_conditions(text: str) -> list[Condition]:
    """Parse the text of ``--where``, such as ``dataset=digits,compressor=topk:ratio=0.01,skip=norm``.

    Commas separate conditions, and also the options of a component. A part between commas is an option of the component
    before it if its name is not a column, or if its name is both a column and an option of that component. To use such
    a name as a column instead, write its condition before the component.

    Raises:
        UsageError: a part is not COLUMN=VALUE, names an unknown column, or has a value that is not of the column's
            type.
    """
    parts: list[str] = []
    for part in text.split(","):
        name = part.partition("=")[0].strip()
        is_option = name not in METRICS_BY_NAME or (name in ALSO_OPTIONS and parts and name in _options(parts[-1]))
        if parts and ":" in parts[-1] and is_option:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return [_condition(part) for part in parts]


def _options(condition: str) -> Collection[str]:
    # Return the option names of the component in a condition such as ``compressor=topk:ratio=0.01``; empty if unknown.
    column, _, value = condition.partition("=")
    kinds = {each.singular: kind for kind, each in registry.KINDS.items()}
    kind, name = kinds.get(column.strip()), value.partition(":")[0].strip()
    return registry.load(kind, name).option_names() if kind and name in registry.entries(kind) else ()  # imports torch


def _condition(text: str) -> Condition:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise UsageError(f"'{text}' is not a condition; write --where COLUMN=VALUE, such as dataset=digits")
    column = find_column(name)
    try:  # tables show an empty cell as NOTHING
        return column.name, from_cell("" if value == NOTHING else value, column.type)
    except ValueError as error:
        raise UsageError(f"--where {text}: {error}") from None


def select(runs: Sequence[Run], conditions: Sequence[Condition]) -> list[Run]:
    """Return the runs that meet every condition.

    Raises:
        NothingToCompare: no run meets all conditions; the message names a column whose condition no run meets, and
            lists the values that the runs have in it.
    """
    kept = list(runs)
    for column, wanted in conditions:
        found = dict.fromkeys(run[column] for run in kept)
        fits = {
            value for value in found if value == wanted or (isinstance(value, str) and value.split(":")[0] == wanted)
        }
        if not fits:
            listing = ", ".join(format_value(column, value) for value in found)
            raise NothingToCompare(f"no run has {column} {format_value(column, wanted)}; the runs have: {listing}")
        kept = [run for run in kept if run[column] in fits]
    return kept
