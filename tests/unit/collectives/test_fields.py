"""Messages laid out around their last field."""

from __future__ import annotations

import torch

from collectives.payloads.base import Dense, unpack
from collectives.payloads.codes import Codes, TwoMeans

CPU = torch.device("cpu")


def test_a_payload_with_room_packs_the_bytes_of_one_without_and_copies_nothing() -> None:
    scales = torch.tensor([0.5, 2.0, 3.0])
    codes = Codes.room_for_codes(20, 4, CPU, block_numel=8)
    bits, values = TwoMeans.room(3, torch.uint8, CPU), Dense.room(20, torch.half, CPU)
    for field in (codes, bits, values):
        field.copy_(torch.arange(field.numel()))
    for payload, field, copy in (
        (Codes(20, "levels", 4, codes, scales, 8), codes, Codes(20, "levels", 4, codes.clone(), scales, 8)),
        (TwoMeans(20, -1.0, 1.0, bits), bits, TwoMeans(20, -1.0, 1.0, bits.clone())),
        (Dense(values), values, Dense(values.clone())),
    ):
        packed = payload.pack()
        assert torch.equal(packed, copy.pack())
        assert packed.data_ptr() + packed.numel() == field.data_ptr() + field.numel() * field.element_size()
        assert torch.equal(unpack(packed).to_dense(), copy.to_dense())


def test_a_part_of_a_payload_with_room_is_copied() -> None:
    values = Dense.room(20, torch.float32, CPU).copy_(torch.arange(20))
    part = Dense(values).slice(10, 20)
    assert unpack(part.pack()).to_dense().tolist() == list(range(10, 20))
    assert values.tolist() == list(range(20))


def test_what_was_received_is_packed_into_memory_of_its_own() -> None:
    """The received buffer may belong to the sender, or be reused for another payload."""
    received = Dense(torch.arange(20)).pack()
    packed = unpack(received).pack()
    assert torch.equal(packed, received)
    assert packed.data_ptr() != received.data_ptr()
