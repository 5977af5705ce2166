"""Recorded choices are made again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from collectives.allreduce import Ring
from collectives.options import Incompatible, OptionError
from compressors.auto.choice import Choice, read_choices
from compressors.auto.compressor import Auto
from compressors.layer import Layer, Step
from gradwire.exchange.report import Bucket
from tests.extensions.auto.played import (
    GROUPS,
    LAYERS,
    TOPK,
    WAYS,
    Rank,
    chooser_of,
    chosen,
    exchanged,
    fast_link,
    gradients,
    run,
    slow_link,
)
from tests.testing.memory_transport import MemoryTransport, run_threads


def test_choices_are_made_again_at_the_same_steps() -> None:
    made = chosen(slow_link, 60)[0]

    def rank(transport: MemoryTransport) -> list[Choice]:
        one = Rank(transport, made[0])
        chooser = chooser_of(Auto(), one.reducer, transport)
        held: list[Choice] = []
        later = [choice for index, choice in enumerate(made) if index and choice != made[index - 1]]
        decisions = chooser.follow(later)

        def exchange(step: int) -> Step:
            held.append(exchanged(one, one.at(step), flat=False))
            return one.at(step)

        run(chooser, decisions, exchange, fast_link, later[-1].step)
        return held

    assert run_threads(rank, 2) == [made[: made[-1].step]] * 2


def test_a_file_of_choices_ends_where_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "choices.jsonl"
    path.write_text("".join(json.dumps(choice.to_dict()) + "\n" for choice in WAYS) + '{"step": 9, "pa')
    assert read_choices(path) == list(WAYS)
    path.write_text("\n".join(json.dumps(choice.to_dict()) for choice in WAYS))
    assert read_choices(path) == list(WAYS)  # an editor may have removed the last newline
    assert WAYS[1].columns(LAYERS)["chosen"] == f"{GROUPS} 60.2%, {TOPK} 39.8%"


@pytest.mark.parametrize(
    "text", ["", '{"step": 9, "pa', "[]\n", '{"step": 1}\n', "not json\n", '{"step": 1, "parts": [{"layers": []}]}\n']
)
def test_a_file_that_holds_no_choices_is_refused_in_one_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "choices.jsonl"
    path.write_text(text)
    with pytest.raises(OptionError, match=r"holds no choices .*; give the choices.jsonl of a run with auto"):
        Auto(choices=str(path))
    with pytest.raises(OptionError, match="holds no choices"):
        Auto(choices=str(tmp_path / "absent"))


def test_a_layer_without_elements_goes_through_no_pair() -> None:
    """Candidates omit such a layer, so no choice contains it."""
    empty = Layer(id=7, name="nothing", shape=(0,), numel=0)

    def rank(transport: MemoryTransport) -> list[int]:
        one = Rank(transport, WAYS[0])
        mine = [*gradients(transport.rank, 0), torch.empty(0)]
        bucket = Bucket(layers=[*LAYERS, empty], gradients=mine, step=one.at(0))
        one.reducer.start(bucket, one.sums.start, transport).finish()
        return [encoded.layer.id for encoded in bucket.encoded]

    assert run_threads(rank, 2) == [[0, 1, 2]] * 2


def test_choices_fit_a_model_with_an_empty_layer(tmp_path: Path) -> None:
    path = tmp_path / "choices.jsonl"
    path.write_text(json.dumps(WAYS[0].to_dict()) + "\n")
    empty = Layer(id=7, name="nothing", shape=(0,), numel=0)
    auto = Auto(choices=str(path))
    auto.check_compatible(Ring(), [*LAYERS, empty])
    with pytest.raises(Incompatible, match="are those of another model"):
        auto.check_compatible(Ring(), LAYERS[:2])
