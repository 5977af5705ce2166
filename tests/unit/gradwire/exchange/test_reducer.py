"""Memory for payloads that are sent whole: it is reused after its sum is complete, and not before."""

from __future__ import annotations

import pytest

from collectives.base import Key, PendingSum
from collectives.payloads.base import Dense, Payload
from collectives.transport.base import SingleRank
from compressors.floats import NoCompression
from gradwire.exchange.reducer import reducer_for
from gradwire.exchange.report import Bucket
from tests.testing.compressor_cases import gradient, layers_of_shapes, step_at

LAYERS = layers_of_shapes((30, 20))


@pytest.mark.parametrize("is_summed", [True, False])
def test_a_message_lies_where_the_last_one_lay_once_that_is_summed(is_summed: bool) -> None:
    """A message for somebody else is never written again."""
    reducer, addresses = reducer_for(NoCompression()), set[int]()

    def start_sum(payload: Payload, key: Key = ()) -> PendingSum:
        assert isinstance(payload, Dense)
        addresses.add(payload.values.data_ptr())
        sent.append(payload)
        return PendingSum.done(payload)

    sent: list[Payload] = []
    for index in range(3):
        bucket = Bucket(layers=LAYERS, gradients=[gradient(LAYERS[0], index, 0)], step=step_at(index))
        if is_summed:
            reducer.start(bucket, start_sum, SingleRank()).finish()
        else:
            message = reducer.message(bucket)
            assert message is not None
            start_sum(message)
        reducer.commit()
    assert len(addresses) == (1 if is_summed else 3)
