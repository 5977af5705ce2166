"""Components by text, without the registry of bench."""

from __future__ import annotations

import pytest

from collectives.options import OptionError, Options, build
from compressors.base import Compressor, PerLayer
from compressors.floats import NoCompression
from compressors.topk import TopK


def test_texts_name_files_and_their_options() -> None:
    made = build("compressors", Compressor, "topk:ratio=0.5,skip=norm+bias")
    assert isinstance(made, TopK)
    assert (made.ratio, made.skip) == (0.5, ("norm", "bias"))
    assert isinstance(build("compressors", Compressor, "none"), NoCompression)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("top", r"there is no compressor 'top' \(did you mean 'topk'\?\)"),
        ("topk:ration=0.1", "did you mean 'ratio'"),
        ("topk:ratio=2", "topk: ratio=2 is not possible"),
        ("layer", "there is no compressor 'layer'"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(text: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        build("compressors", Compressor, text)


def test_an_author_meets_at_most_thirteen_members() -> None:
    members = {name for cls in (PerLayer, Compressor) for name in vars(cls) if not name.startswith("_")}
    assert len(members - set(dir(Options))) <= 13
