"""Packed state: unpacking restores it, and other bytes are refused without running code."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.exchange.packed_state import PackedState, StateError, load_state, pack_state, unpack_state


def example() -> dict[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "residuals": {3: torch.randn(5, generator=generator), 0: torch.empty(0)},
        ((1, 2), 0): torch.randn(3, 4, generator=generator).t(),
        "kept": [torch.tensor(7), torch.ones(3, dtype=torch.bfloat16), torch.tensor([True, False])],
        "counts": (1, 2.5, None, True, "text", float("inf"), [], (), {}),
        "images": torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last),
    }


def assert_equal(a: Any, b: Any) -> None:
    """Fail unless types and values are equal; tensors bit for bit, with equal strides and as aligned as new ones."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.stride(), a.data_ptr() % 64) == (b.dtype, b.stride(), 0)
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        assert_equal(list(a.values()), list(b.values()))
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


def test_a_state_comes_back_as_it_was() -> None:
    assert_equal(unpack_state(pack_state(example())), example())


def test_a_copy_does_not_change_with_its_state() -> None:
    state = {"residual": torch.ones(4)}
    packed = PackedState(state)
    state["residual"].zero_()
    assert unpack_state(packed.to_tensor())["residual"].tolist() == [1, 1, 1, 1]


def test_a_file_holds_what_was_packed_and_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    PackedState(example()).save(path)
    assert_equal(load_state(path, torch.device("cpu")), example())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StateError, match="is no packed state"):
        load_state(path, torch.device("cpu"))
    with pytest.raises(OSError, match="No such file"):
        PackedState(example()).save(tmp_path / "nowhere" / "state")


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.ones(2).to_sparse(), torch.ones(2, dtype=torch.complex64)])
def test_what_cannot_be_packed_is_refused_before_anything_is_written(value: Any) -> None:
    with pytest.raises((TypeError, RuntimeError)):
        PackedState({"value": value})


def test_a_pickle_is_refused_and_not_opened() -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return pytest.fail, ("it was opened",)

    with pytest.raises(StateError, match="no packed state"):
        unpack_state(torch.frombuffer(bytearray(pickle.dumps(Trap())), dtype=torch.uint8))


def test_no_change_of_its_bytes_reads_beyond_them() -> None:
    packed, chance = pack_state(example()), random.Random(1)
    for _ in range(300):
        bad = packed[: chance.randrange(len(packed))].clone() if chance.random() < 0.3 else packed.clone()
        for _ in range(chance.randrange(1, 4)):
            if len(bad):
                bad[chance.randrange(min(len(bad), 900))] = chance.randrange(256)
        try:
            unpack_state(bad)
        except StateError as error:
            assert "no packed state" in str(error)  # noqa: PT017 - some changes leave it readable
