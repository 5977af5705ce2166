"""Choose the baseline: the row that all others are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.core.errors import UsageError
from bench.report.configurations import Configuration


class NoSuchBaseline(UsageError):
    """No row matches the baseline that the user named."""


# How a configuration can be named, the most exact way first.
_MATCHES: tuple[Callable[[Configuration, str], bool], ...] = (
    lambda row, text: text in row.distinct("compressor"),
    lambda row, text: text in {f"{a}+{b}" for a, b in _specs(row)},
    lambda row, text: text in row.distinct("name"),
    lambda row, text: text in row.distinct("config_id"),
    lambda row, text: text == row.title or text in map(str, row.label.values()),
    lambda row, text: text in map(_bare, row.distinct("compressor")),
    lambda row, text: text in {f"{_bare(a)}+{_bare(b)}" for a, b in _specs(row)},
)


def choose(
    rows: Sequence[Configuration], wanted: str | None, defaults: Sequence[str] = ("none",)
) -> tuple[Configuration, str | None]:
    """Choose the baseline of a comparison.

    If several rows match, those with a successful run come first, then those on the collective ``native``, then the
    order of appearance decides.

    Args:
        rows: the configurations, in order of appearance; at least one.
        wanted: a compressor, ``compressor+collective``, a run's name or a label's value. An exact spec takes precedence
            over a component's name without options. None: the first default that has a successful run.
        defaults: compressors to choose from if ``wanted`` is None, the preferred one first.

    Returns:
        The baseline, and a sentence for the user if several rows match or no default does; otherwise None.

    Raises:
        NoSuchBaseline: no row matches ``wanted``; the message lists the rows.
    """
    if wanted is None:
        fit = [row for row in rows if row.ok] or rows
        for compressor in defaults:
            if dense := [row for row in fit if row.distinct("compressor") == [compressor]]:
                chosen = _preferred(dense)
                others = (
                    f"{len(dense)} rows use {compressor}; the baseline is {chosen.title} (--baseline chooses another)"
                )
                return chosen, others if len(dense) > 1 else None
        said = f"no row uses {' or '.join(defaults)}, so the baseline is {fit[0].title} (--baseline chooses another)"
        return fit[0], said if len(fit) > 1 else None
    for matches in _MATCHES:
        fitting = [row for row in rows if matches(row, wanted)]
        if fitting:
            chosen = _preferred(fitting)
            if len(fitting) == 1:
                return chosen, None
            return chosen, f"{len(fitting)} rows fit --baseline {wanted}; the baseline is {chosen.title}"
    raise NoSuchBaseline(f"no row fits --baseline {wanted}; the rows are: {'; '.join(row.title for row in rows)}")


def _preferred(rows: Sequence[Configuration]) -> Configuration:
    fit = [row for row in rows if row.ok] or rows
    return next((row for row in fit if row.distinct("collective") == ["native"]), fit[0])


def _bare(spec: str) -> str:
    return spec.partition(":")[0]


def _specs(row: Configuration) -> set[tuple[str, str]]:
    return {(run["compressor"], run["collective"]) for run in row.runs}
