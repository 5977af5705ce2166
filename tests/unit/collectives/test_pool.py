"""The pool on one machine: what is booked, where slots lie, and every reason for which a region can be refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from collectives import options
from collectives.options import OptionError
from collectives.payloads import Dense
from collectives.pool import Pool, PoolRounds, lines_of, region_nbytes
from collectives.transport import mapped_memory, memory_region
from collectives.transport.mapped_memory import SharedMemory, nbytes_of
from collectives.transport.memory_region import Region, reserve
from tests.testing.memory_transport import MemoryTransport, MemoryWires, run_threads


def test_a_gradient_in_the_pool_is_booked_with_all_that_is_written_there() -> None:
    """12 fp32 elements for two ranks fit into one line, which rank 0 adds: 48 bytes there, 48 of a result, 48 total."""

    def rank(transport: MemoryTransport) -> int:
        bound = Pool(slot_bytes=4096).bind(transport)
        bound.sum(Dense(bound.buffer(12)), (0,))
        return transport.traffic["gradient"].nbytes

    assert run_threads(rank, 2) == [48 + 48 + 48, 48 + 48]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 15, 16, 129, 10_007])
def test_no_line_of_a_result_has_two_writers(numel: int, dtype: torch.dtype) -> None:
    """With two writers, a non-coherent cache would write back a stale copy of the other's part."""
    tensor = torch.zeros(numel, dtype=dtype)
    slices = [lines_of(tensor, rank, 3) for rank in range(3)]
    assert [index for part in slices for index in range(numel)[part]] == list(range(numel))
    assert all(part.start * dtype.itemsize % 128 == 0 or part.start == numel for part in slices)


def test_places_are_named_for_all_regions_or_for_each() -> None:
    for text in ("path=/a+/b", "path=/a+/b,regions=3", "path=none"):
        with pytest.raises(OptionError, match="name one place for all regions, or one for each"):
            options.build("collectives", Pool, f"pool:{text}")


def refusals(path: str, slot_bytes: int = 4096, coherent: bool | None = None) -> list[str]:
    """Return the error message of each of two ranks."""

    def rank(transport: MemoryTransport) -> str:
        with pytest.raises(OptionError) as caught:
            Pool(path=(path,), slot_bytes=slot_bytes, coherent=coherent).bind(transport)
        return str(caught.value)

    return run_threads(rank, 2)


def test_all_ranks_refuse_a_place_that_cannot_serve(tmp_path: Path) -> None:
    file = tmp_path / "precious"
    file.write_text("data")
    for said, sentence in (
        (refusals("/dev/shm", 2**40), "no room for"),
        (refusals("/dev/shm", 2**40), "smaller slot_bytes"),
        (refusals(str(tmp_path / "nowhere" / "region")), "give a folder or a new file"),
        (refusals(str(file)), "File exists"),
        (refusals("/dev/null", coherent=True), "no DAX device"),
        (refusals("/dev/zero"), "set coherent=true or coherent=false"),
    ):
        assert all(sentence in each for each in said)
    assert file.read_text() == "data"


@pytest.fixture
def _without_helper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let there be no helper yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mapped_memory.cache_lines.cache_clear()
    yield
    mapped_memory.cache_lines.cache_clear()


@pytest.mark.usefixtures("_without_helper")
@pytest.mark.parametrize(("machine", "coherent"), [("x86_64", False), ("riscv64", None)])
def test_memory_without_coherence_and_reordered_stores_need_the_helper(
    monkeypatch: pytest.MonkeyPatch, machine: str, coherent: bool | None
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert all("needs a C compiler" in said for said in refusals("/dev/shm", coherent=coherent))


@pytest.mark.usefixtures("_without_helper")
def test_a_helper_that_cannot_be_kept_is_refused_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "gradwire").write_text("a file where a folder is to be")
    assert all("set XDG_CACHE_HOME" in said for said in refusals("/dev/shm", coherent=False))


@pytest.mark.skipif(sys.platform != "linux", reason="files without a name are Linux's")
def test_a_region_in_a_folder_has_no_name_that_could_be_left_behind(in_memory: Path) -> None:
    """Killed ranks therefore never leave a file behind."""
    path, nbytes, *_ = reserve(in_memory, 4096, "less")
    regions = [Region(path, nbytes) for _ in range(2)]
    assert not list(in_memory.iterdir())
    regions[0].remove_name()
    assert not path.exists()
    regions[0].memory[7] = 7
    assert regions[1].memory[7] == 7


def test_where_files_need_a_name_it_is_removed_once_all_have_the_region(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_region, "sys", SimpleNamespace(platform="darwin"))
    path, nbytes, *_ = reserve(tmp_path, 4096, "less")
    assert [path] == list(tmp_path.iterdir())
    Region(path, nbytes).remove_name()
    assert list(tmp_path.iterdir()) == []


def test_another_machines_file_of_the_same_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("short", encoding="utf-8")
    with pytest.raises(OSError, match="another file of that name"):
        Region(tmp_path / "file", 4096)


def test_another_machines_memory_is_recognised(tmp_path: Path) -> None:
    path, nbytes, *_ = reserve(tmp_path, nbytes_of(2, 4096), "less")
    parts = [SharedMemory(Region(path, nbytes), 2, None, coherent=True) for _ in range(2)]
    parts[0].format(b"0123456789abcdef")
    parts[1].check(b"0123456789abcdef")
    with pytest.raises(OptionError, match="do not see the same memory"):
        parts[1].check(b"fedcba9876543210")


@pytest.mark.parametrize("num_regions", [1, 2, 3, 20])
@pytest.mark.parametrize("num_sets", [1, 2])
def test_slots_lines_and_results_do_not_overlap(num_sets: int, num_regions: int, tmp_path: Path) -> None:
    extents = [
        reserve(tmp_path, nbytes_of(3, region_nbytes(3, 4096, num_sets, num_regions)), "less")
        for _ in range(num_regions)
    ]
    memories = [SharedMemory(Region(*extent), 3, None, coherent=True) for extent in extents]
    rounds = PoolRounds(MemoryWires(3).transport(1), memories, 4096, num_sets)
    parts = [rounds.slot(round_, rank, 4096) for round_ in range(num_sets) for rank in (0, 1, 2, 3)]
    for number, part in enumerate(parts):
        part.fill_(number)
    memories[0].announce(1, 0, 7)
    assert [int(part.unique()) for part in parts] == list(range(len(parts)))
    assert memories[0].all_announced(0).tolist() == [0, 7, 0]
    most = -(-len(parts) // num_regions)  # as even as possible
    assert [extent.nbytes for extent in extents] == [4096 * (1 + 1 + most)] * num_regions


@pytest.mark.xdist_group("/dev/zero")  # regions of one device next to each other, whichever process maps them
@pytest.mark.parametrize(("alignment", "length"), [(4096, 53_248), (2 << 20, 2 << 20), (1 << 30, 1 << 30)])
def test_a_device_is_mapped_in_units_of_its_alignment_beside_what_others_map(
    alignment: int, length: int, tmp_path: Path
) -> None:
    facts = tmp_path / "bus" / "dax" / "devices" / "zero"
    facts.mkdir(parents=True)
    (facts / "size").write_text(f"{4 << 30}\n")
    (facts / "align").write_text(f"{alignment}\n")

    def region() -> tuple[Region, int, int]:
        extent = reserve(Path("/dev/zero"), 50_000, "less", sysfs=tmp_path)
        return Region(*extent), extent.nbytes, extent.offset

    regions = [region() for _ in range(3)]
    assert [place[1:] for place in regions] == [(length, 0), (length, length), (length, 2 * length)]
    del regions[1]
    assert region()[1:] == (length, length)
    (facts / "size").write_text("4096\n")
    with pytest.raises(OptionError, match="holds 4096 bytes"):
        reserve(Path("/dev/zero"), 50_000, "less", sysfs=tmp_path)
