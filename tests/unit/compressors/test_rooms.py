"""Memory for payloads that are sent whole: it is reused after its sum is complete, and not before."""

from __future__ import annotations

from collectives.base import Key, PendingSum
from collectives.payloads.base import Dense, Payload
from collectives.transport.base import SingleRank
from compressors.floats import NoCompression
from gradwire.exchange.reducer import reducer_for
from gradwire.exchange.report import Bucket
from tests.testing.compressor_cases import gradient, layers_of_shapes, step_at

LAYERS = layers_of_shapes((30, 20))


def bucket_at(index: int) -> Bucket:
    return Bucket(layers=LAYERS, gradients=[gradient(layer, index, 0) for layer in LAYERS], step=step_at(index))


def address(payload: Payload | None) -> int:
    assert isinstance(payload, Dense)
    return payload.values.data_ptr()


def test_a_message_lies_where_the_last_one_lay_once_that_is_summed() -> None:
    reducer, sent = reducer_for(NoCompression()), list[Payload]()

    def start_sum(payload: Payload, key: Key) -> PendingSum:
        sent.append(payload)
        return PendingSum.done(payload)

    for index in range(3):
        reducer.start(bucket_at(index), start_sum, SingleRank()).finish()
        reducer.commit()
    assert len({address(payload) for payload in sent}) == 1


def test_a_message_for_somebody_else_is_never_written_again() -> None:
    reducer, sent = reducer_for(NoCompression()), list[Payload | None]()
    for index in range(3):
        sent.append(reducer.message(bucket_at(index)))
        reducer.commit()
    assert len({address(payload) for payload in sent}) == 3
