"""The command `bench place`: model a training step with a network's layers on devices of several kinds."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench.cli.commands import MODEL, Command
from bench.cli.options import complete
from bench.core.waiting import waiting
from bench.extensions.place.topology import Topology

MOST = 2**20
EXAMPLES = """[bold]Examples[/bold]

  bench place --model resnet50 --devices examples/cxl.toml

  bench place --model resnet50:stem=imagenet --image-size 224 --num-classes 1000 --devices examples/cxl.toml

  bench place --model small_cnn:width=64 --devices examples/cxl.toml --batch-size 256 --activations turns

  bench place --model resnet20 --devices my_devices.toml --catalog my_catalogue --json

[bold]Figures[/bold]

  nominal: from data sheets, correct to an order of magnitude; measured: measured on this machine by this command;
  modelled: computed from nominal and measured figures.

  Operations and bytes are counted from the network's shapes.

[bold]The model[/bold]

  operation: the longer of flops / (peak x efficiency) and bytes / memory rate, plus the launch time. The backward pass
  takes this time for each gradient that it computes.

  transfer: the sum of the latencies of a route's links, plus bytes / the slowest rate. Values are sent forward, and
  their gradients back.

  makespan: the time of the whole step. Devices and links work in the network's order, each on one task at a time; links
  carry both directions at the same time. With several pools of devices, each pool holds a replica, and the pools add
  their gradients in memory at the host.

  break-even rate: bytes sent between devices / seconds that the operations save compared with the best single device.

[bold]Catalogue[/bold]

  Put your own entries into $XDG_CONFIG_HOME/gradwire/catalog/*.toml (~/.config if it is not set) or into --catalog:

  \\[link.mine] gbytes_per_s = 40, latency_us = 0.5, source = "..."

  \\[device.mine] tflops = 10, gbytes_per_s = 900, launch_us = 5, efficiency = { activation = 0.1 }, source = "..."

  An entry replaces a built-in one of the same name. Add figures = "measured" if you have measured the figures."""


def place(
    model: Annotated[str, typer.Option(help="Network to train.", autocompletion=complete("models"))],
    devices: Annotated[Path, typer.Option(help="Device file: a host, its devices and links.", metavar="FILE")],
    batch_size: Annotated[
        int, typer.Option(min=1, max=MOST, help="Samples in the mini-batch of one copy of the network.")
    ] = 32,
    num_classes: Annotated[int, typer.Option(min=1, max=MOST, help="Outputs of the network.")] = 10,
    image_size: Annotated[int, typer.Option(min=1, max=4096, help="Side of the square images, in pixels.")] = 32,
    activations: Annotated[
        Literal["asic", "dpu", "turns"], typer.Option(help="Devices for activations; turns: both roles alternate.")
    ] = "asic",
    catalog: Annotated[Path | None, typer.Option(help="Folder with your own links and devices.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data as JSON on stdout.")] = False,
) -> None:
    """Model a training step whose layers are placed by type on a file's devices, with the file's links and others."""
    topology = Topology.read(devices)
    from bench.extensions.place.catalog import SHM, Catalog, folders, measured_link

    figures = Catalog.read(folders(catalog))
    from bench.extensions.place.placements import PlacementComparison, print_costs
    from bench.extensions.place.step import network_of

    waiting.doing(f"tracing {model}")
    traced, operations = network_of(model, num_classes=num_classes, batch_size=batch_size, image_size=image_size)
    comparison = PlacementComparison(traced, operations, topology, activations=activations, batch_size=batch_size)
    if SHM not in figures.links:
        waiting.doing("measuring the memory that processes share")
        figures = dataclasses.replace(figures, links={SHM: measured_link(), **figures.links})
    title = f"{model}, {batch_size} samples, {devices}, activations on {activations}"
    print_costs(comparison, figures, title, as_json=as_json)


COMMAND = Command(function=place, epilog=EXAMPLES, panel=MODEL)
