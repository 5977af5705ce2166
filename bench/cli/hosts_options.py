"""The options of virtual hosts, shared by the commands that start ranks there."""

from __future__ import annotations

from typing import Annotated

import typer

PANEL = "Virtual hosts"

Hosts = Annotated[
    int | None, typer.Option(min=1, help="Use so many virtual hosts of this machine.", rich_help_panel=PANEL)
]
RanksPerHost = Annotated[
    int | None, typer.Option(min=1, help="Ranks on each virtual host (default: 1).", rich_help_panel=PANEL)
]
Network = Annotated[
    str | None, typer.Option(help="A named network: adsl, 4g, wifi, 1gbe or 10gbe.", rich_help_panel=PANEL)
]
Bandwidth = Annotated[str | None, typer.Option(help="Rate of each link, up and down: 100mbit.", rich_help_panel=PANEL)]
Uplink = Annotated[str | None, typer.Option(help="Rate of what a host sends.", rich_help_panel=PANEL)]
Downlink = Annotated[str | None, typer.Option(help="Rate of what a host receives.", rich_help_panel=PANEL)]
Latency = Annotated[str | None, typer.Option(help="One-way delay of what a host sends: 5ms.", rich_help_panel=PANEL)]
Jitter = Annotated[str | None, typer.Option(help="How far the delay varies: 1ms.", rich_help_panel=PANEL)]
Loss = Annotated[str | None, typer.Option(help="Share of frames lost: 1%.", rich_help_panel=PANEL)]
ClusterFile = Annotated[
    str | None, typer.Option(help="A TOML file that describes uneven virtual hosts.", rich_help_panel=PANEL)
]
