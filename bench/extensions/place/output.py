"""Output of `bench place`: placements, devices and links of a step, the conclusions, and the times on every link."""

import dataclasses
from collections.abc import Iterable

from rich.table import Table

from bench.cli.console import plain_table, print_json, stdout_console
from bench.core.units import format_bytes, format_seconds
from bench.extensions.place.catalog import Catalog
from bench.extensions.place.placements import BY_TYPE, MATRIX_AND_CONVOLUTION, Cost, Costs, PlacementComparison


def print_costs(comparison: PlacementComparison, catalog: Catalog, title: str, *, as_json: bool) -> None:
    """Print the costs of the step with every placement."""
    own = comparison.costs(catalog)
    by_link = {link: comparison.costs(catalog, link) for link in catalog.links}
    notes = [*comparison.notes, *verdict(own)]
    if as_json:
        by_type, single = own.by_placement[BY_TYPE], own.by_placement[own.best_single]
        content = {
            "title": title,
            "figures": "modelled",
            "placements": {
                name: dataclasses.asdict(cost) | {"transfer_share": cost.transfer_share}
                for name, cost in own.by_placement.items()
            },
            "best_single": own.best_single,
            "break_even_bytes_per_s": by_type.break_even_bytes_per_s(single),
            "notes": notes,
            "by_link": {
                kind: {name: cost.makespan_s for name, cost in each.by_placement.items()}
                for kind, each in by_link.items()
            },
            "links": {name: dataclasses.asdict(kind) for name, kind in catalog.links.items()},
            "devices": {name: dataclasses.asdict(kind) for name, kind in catalog.devices.items()},
        }
        print_json(content)
        return
    console = stdout_console()
    for table in (_placements(own, title), _devices(own, catalog), _links(own, catalog), _by_link(by_link, catalog)):
        console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)


def verdict(costs: Costs) -> list[str]:
    """Return the conclusions, one sentence each."""
    by_type, without = costs.by_placement[BY_TYPE], costs.by_placement[MATRIX_AND_CONVOLUTION]
    single = costs.by_placement[costs.best_single]
    if not by_type.cut_nbytes:
        return [
            f"Placing by type puts everything on one device: {format_seconds(by_type.makespan_s)} per step (modelled)."
        ]
    ratio = by_type.makespan_s / single.makespan_s
    outcome = "loses" if ratio > 1 else "wins"
    first = (
        f"Placing by type {outcome}: {format_seconds(by_type.makespan_s)} per step, {_times(ratio)} the "
        f"{format_seconds(single.makespan_s)} of {costs.best_single} (modelled)."
    )
    if (rate := by_type.break_even_bytes_per_s(single)) is None:
        second = (
            f"There is no break-even rate: on any links, the operations take {format_seconds(by_type.compute_s)} "
            f"by type and {format_seconds(single.compute_s)} {costs.best_single}."
        )
    else:
        second = (
            f"At its break-even rate of {format_bytes(rate)}/s, transfers would take as long as its operations save."
        )
    return [first, second, _activations_break_even(by_type, without)]


def _activations_break_even(by_type: Cost, without: Cost) -> str:
    if by_type.cut_nbytes <= without.cut_nbytes:
        return "Activations transfer no more bytes than they would on the device that computes their input."
    moved = f"Activations on their own device transfer {format_bytes(by_type.cut_nbytes - without.cut_nbytes)} more"
    rate = by_type.break_even_bytes_per_s(without)
    if rate is None:
        return f"{moved} than {MATRIX_AND_CONVOLUTION}, and the operations are not faster."
    gained = format_seconds(without.compute_s - by_type.compute_s)
    outcome = "loses" if by_type.makespan_s > without.makespan_s else "wins"
    return (
        f"{moved} than {MATRIX_AND_CONVOLUTION}, and the operations take {gained} less: it {outcome} here, and breaks "
        f"even at {format_bytes(rate)}/s."
    )


def _placements(costs: Costs, title: str) -> Table:
    headings = ("placement", "makespan", "critical path", "serial sum", "operations", "link time", "share of link time",
                "sent between devices", "against the best device")  # fmt: skip
    best = costs.by_placement[costs.best_single].makespan_s
    rows = [
        (
            name,
            *map(format_seconds, (cost.makespan_s, cost.critical_path_s, cost.serial_s)),
            *map(format_seconds, (cost.compute_s, cost.transfer_s)),
            f"{cost.transfer_share:.1%}",
            format_bytes(cost.cut_nbytes),
            _times(cost.makespan_s / best),
        )
        for name, cost in costs.by_placement.items()
    ]
    return _table(f"{title}: one training step, modelled", headings, rows)


def _devices(costs: Costs, catalog: Catalog) -> Table:
    rows = [
        (
            device.name,
            device.role,
            device.kind,
            str(device.operations),
            format_seconds(device.busy_s),
            f"{catalog.devices[device.kind].flops_per_s / 1e12:g} TFLOP/s",
            f"{format_bytes(catalog.devices[device.kind].memory_bytes_per_s)}/s",
            catalog.devices[device.kind].figures,
        )
        for device in costs.by_placement[BY_TYPE].devices
    ]
    headings = ("device", "role", "kind", "operations", "busy (modelled)", "peak", "memory", "figures")
    return _table("Devices, placed by type", headings, rows)


def _links(costs: Costs, catalog: Catalog) -> Table:
    cost = costs.by_placement[BY_TYPE]
    rows = [
        (
            f"{link.node} - {link.to}",
            link.kind,
            *_figures(catalog, link.kind),
            format_bytes(link.nbytes_to_host),
            format_bytes(link.nbytes_from_host),
            format_seconds(link.busy_s),
            f"{link.busy_s / cost.makespan_s:.1%}",
        )
        for link in cost.links
    ]
    headings = ("link", "kind", "rate", "latency", "figures", "towards the host", "from the host", "busy (modelled)",
                "of the makespan")  # fmt: skip
    return _table("Links, placed by type", headings, rows)


def _by_link(by_link: dict[str, Costs], catalog: Catalog) -> Table:
    rows = []
    for kind, costs in by_link.items():
        shown = [costs.by_placement[name] for name in (BY_TYPE, MATRIX_AND_CONVOLUTION, costs.best_single)]
        by_type, _, single = shown
        rows.append(
            (
                kind,
                *_figures(catalog, kind),
                *(format_seconds(cost.makespan_s) for cost in shown),
                costs.best_single,
                f"{by_type.transfer_share:.1%}",
                _times(by_type.makespan_s / single.makespan_s),
            )
        )
    headings = ("every link", "rate", "latency", "figures", BY_TYPE, MATRIX_AND_CONVOLUTION, "best device", "which",
                "share of link time", "by type against it")  # fmt: skip
    return _table("Modelled makespans if every link were of one kind", headings, rows)


def _figures(catalog: Catalog, kind: str) -> tuple[str, str, str]:
    link = catalog.links[kind]
    return f"{format_bytes(link.bytes_per_s)}/s", format_seconds(link.latency_s), link.figures


def _times(ratio: float) -> str:
    return f"{ratio:.3g}x" if ratio < 999.5 else f"{ratio:.0f}x"


def _table(title: str, headings: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Table:
    table = plain_table(title)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=not index)
    for row in rows:
        table.add_row(*row)
    return table
