"""The pool: many successive sums in real processes, and every reason for which a region can be refused."""

from __future__ import annotations

import itertools
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from collectives import options
from collectives.options import OptionError
from collectives.payloads import Dense
from collectives.payloads.base import Payload
from collectives.pool import Pool, PoolRounds, lines_of, region_nbytes
from collectives.transport import mapped_memory, memory_region
from collectives.transport.base import ReduceOp
from collectives.transport.mapped_memory import SharedMemory, nbytes_of
from collectives.transport.memory_region import Region, reserve
from collectives.transport.messages import sum_wires
from collectives.transport.process_group import ProcessGroupTransport
from tests.testing.limits import LIMIT_S
from tests.testing.memory_transport import MemoryTransport, MemoryWires, run_threads
from tests.testing.payloads import packed_codes
from tests.testing.ranks import run_ranks

NUM_CALLS = 1000
WORLD_SIZE = 3


def contribution(call: int, rank: int) -> Payload:
    """Return integers, whose sum is exact in any order; lengths are near that of a slot, and one kind is gathered."""
    rng = random.Random(call)
    generator = torch.Generator().manual_seed(WORLD_SIZE * call + rank)
    if call % 5 == 4:
        codes = torch.randint(0, 16, (rng.choice([0, 1, 50, 20_000]),), generator=generator)
        return packed_codes(codes, codebook="levels", bits=4, scales=torch.ones(min(1, codes.numel())))
    dtype = rng.choice([torch.float32, torch.float16, torch.int64])
    return Dense(torch.randint(-9, 9, (rng.choice([0, 1, 2, 1023, 1024, 1025, 5000]),), generator=generator).to(dtype))


def sum_in_a_row(rank: int, folder: str) -> list[int]:
    """Return the numbers of the calls whose result was wrong."""
    rng = random.Random(1000 + rank)
    pool = Pool(path=(folder,), slot_bytes=4096).bind(ProcessGroupTransport(timeout_s=LIMIT_S))
    wrong = []
    for call in range(NUM_CALLS):
        if rng.random() < 0.1:
            time.sleep(rng.random() * 2e-3)
        total = pool.sum(contribution(call, rank), (0,)).to_dense()
        expected = sum(contribution(call, other).to_dense() for other in range(WORLD_SIZE))
        if not torch.equal(total, torch.as_tensor(expected)):
            wrong.append(call)
    pool.close()
    return wrong


@pytest.mark.parametrize("folder", ["memory", pytest.param("plain files", marks=pytest.mark.long)])
def test_many_sums_in_a_row(folder: str, tmp_path: Path, in_memory: Path) -> None:
    place = in_memory if folder == "memory" else tmp_path / "region"
    place.mkdir(exist_ok=True)
    assert run_ranks(sum_in_a_row, WORLD_SIZE, tmp_path, args=(str(place),)) == [[]] * WORLD_SIZE
    assert not list(place.iterdir())


def buffers_in_a_row(rank: int, folder: str) -> list[int]:
    """Return the calls with wrong results; gradients are in the pool, and are overwritten right after each sum."""
    rng = random.Random(2000 + rank)
    bound = Pool(path=(folder,), slot_bytes=4096, regions=2).bind(ProcessGroupTransport(timeout_s=LIMIT_S))
    dtypes = (torch.float32, torch.float16)
    buffers = [bound.buffer(numel, dtype) for numel in (1, 1023, 5000) for dtype in dtypes]
    wrong = []
    for call in range(NUM_CALLS):
        buffer = buffers[random.Random(call).randrange(len(buffers))]
        generators = [torch.Generator().manual_seed(WORLD_SIZE * call + other) for other in range(WORLD_SIZE)]
        rows = [torch.randn(buffer.numel(), generator=generator).to(buffer.dtype) for generator in generators]
        buffer.copy_(rows[rank])
        if rng.random() < 0.1:
            time.sleep(rng.random() * 2e-3)
        if call % 3 == 0:
            bound.sum(Dense(rows[rank].clone()), (0,))
        total = bound.sum(Dense(buffer), (0,)).wire
        if total.data_ptr() != buffer.data_ptr() or not torch.equal(buffer, sum_wires(rows)):
            wrong.append(call)
        buffer.fill_(torch.nan)
    bound.close()
    return wrong


@pytest.mark.long
def test_many_sums_of_gradients_that_lie_in_the_pool(tmp_path: Path) -> None:
    assert run_ranks(buffers_in_a_row, WORLD_SIZE, tmp_path, args=("/dev/shm",)) == [[]] * WORLD_SIZE


def sum_every_kind(rank: int, world_size: int, folder: str) -> list[str]:
    """Return the sums that differ from the serial sum in rank order."""
    pools = [
        Pool(path=("/dev/shm",)).bind(ProcessGroupTransport(timeout_s=LIMIT_S)),
        Pool(path=("/dev/shm", folder, "/dev/shm"), regions=3).bind(ProcessGroupTransport(timeout_s=LIMIT_S)),
    ]
    shapes = [(numel, torch.float32) for numel in (0, 1, world_size - 1, world_size, world_size + 1, 10**6)]
    shapes += [(1001, dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64)]
    ops: tuple[ReduceOp, ...] = ("sum", "max")
    wrong = []
    for numel, dtype in shapes:
        generators = [torch.Generator().manual_seed(numel + other) for other in range(world_size)]
        rows = [(9 * torch.randn(numel, generator=generator)).to(dtype) for generator in generators]
        expected = {op: sum_wires(rows, op) for op in ops}
        values, buffer = torch.empty(numel, dtype=dtype), pools[1].buffer(numel, dtype)
        for (pool, tensor), op in itertools.product([(pools[0], values), (pools[1], values), (pools[1], buffer)], ops):
            tensor.copy_(rows[rank])
            if not torch.equal(pool.sum(Dense(tensor), (0,), op).wire, expected[op]):
                wrong.append(f"{numel} {dtype} {op}")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
def test_sums_are_the_serial_ones_bit_for_bit(world_size: int, tmp_path: Path) -> None:
    assert run_ranks(sum_every_kind, world_size, tmp_path, args=(world_size, str(tmp_path))) == [[]] * world_size


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


def test_all_ranks_refuse_a_region_without_room() -> None:
    assert all("no room for" in said and "smaller slot_bytes" in said for said in refusals("/dev/shm", 2**40))


def test_all_ranks_refuse_a_path_that_cannot_be_made(tmp_path: Path) -> None:
    assert all("give a folder or a new file" in said for said in refusals(str(tmp_path / "nowhere" / "region")))


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "precious"
    file.write_text("data")
    assert all("File exists" in said for said in refusals(str(file)))
    assert file.read_text() == "data"


def test_all_ranks_refuse_a_device_that_is_not_dax() -> None:
    assert all("no DAX device" in said for said in refusals("/dev/null", coherent=True))


def test_a_device_is_used_only_once_its_coherence_is_stated() -> None:
    assert all("set coherent=true or coherent=false" in said for said in refusals("/dev/zero"))


def test_memory_without_coherence_needs_the_helper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: None)
    mapped_memory.cache_lines.cache_clear()
    assert all("needs a C compiler" in said for said in refusals("/dev/shm", coherent=False))
    mapped_memory.cache_lines.cache_clear()


def test_processors_that_reorder_stores_need_the_helper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    mapped_memory.cache_lines.cache_clear()
    assert all("needs a C compiler" in said for said in refusals("/dev/shm"))
    mapped_memory.cache_lines.cache_clear()


def test_a_helper_that_cannot_be_kept_is_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gradwire").write_text("a file where a folder is to be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mapped_memory.cache_lines.cache_clear()
    assert all("set XDG_CACHE_HOME" in said for said in refusals("/dev/shm", coherent=False))
    mapped_memory.cache_lines.cache_clear()


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
