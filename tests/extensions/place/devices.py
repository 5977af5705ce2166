"""Device files for tests."""

from __future__ import annotations

from pathlib import Path

from bench.extensions.place.topology import Device, Topology

REPOSITORY = Path(__file__).parents[3]
CXL = REPOSITORY / "examples" / "cxl.toml"
TWO_HOSTS = REPOSITORY / "examples" / "two_hosts.toml"


def device_file(folder: Path, **counts: int) -> Path:
    """Write a file with these numbers of devices of each role, each linked to the host."""
    path = folder / f"{'-'.join(f'{role}{count}' for role, count in counts.items())}.toml"
    tables = [f'[[device]]\nrole = "{role}"\ncount = {count}\nlink = "cxl2x16"\n' for role, count in counts.items()]
    path.write_text("\n".join(tables), encoding="utf-8")
    return path


def pool_of(*roles: str) -> tuple[Device, ...]:
    """Return one device of each of these roles."""
    return tuple(Device(name=f"{role}0", role=role, kind=role) for role in roles)  # type: ignore[arg-type]


def shipped() -> Topology:
    """Return the topology of the device file in the examples."""
    return Topology.read(CXL)
