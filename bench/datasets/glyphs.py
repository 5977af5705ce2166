"""Characters of fonts that are installed: `glyphs:classes=500,size=32`, or those of your own fonts, `fonts=FOLDER`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge, Le
from typing_extensions import Doc, override

from bench.datasets.base import IMAGE_SIZE, DatasetError, ImageDataset, Samples
from bench.datasets.folders import note_of
from bench.datasets.fonts import Drawings, drawings_of, fonts_in
from bench.datasets.warp import rotate_scale_shear_shift
from collectives.options import CountOrZero, raise_first


@dataclasses.dataclass(kw_only=True)
class Glyphs(ImageDataset):
    """Glyphs: characters as fonts draw them, to be recognised in fonts that are not trained on.

    Each sample is one character in one face, white on black, the same in all three channels. With the fonts of
    matplotlib, there are eight training faces (DejaVu Sans and Serif) and four held-out faces (DejaVu Sans Mono).
    Augmentation shifts, rotates, scales and shears.

    Characters that a face lacks are left out, and characters that any face draws alike are one class. A hash of the
    code points chooses among them, so the classes of a smaller set are the first classes of a larger one.
    """

    # of the training faces, with the default options
    mean: ClassVar[tuple[float, float, float]] = (0.0984, 0.0984, 0.0984)
    std: ClassVar[tuple[float, float, float]] = (0.2760, 0.2760, 0.2760)
    mirror: ClassVar[bool] = False

    classes: Annotated[int, Ge(2), Le(100_000), Doc("number of characters")] = 500
    size: Annotated[int, Ge(8), Le(64), Doc("side of an image in pixels; capitals are about half as high")] = IMAGE_SIZE
    class_seed: Annotated[CountOrZero, Doc("seed by which characters are chosen, the same for every seed of a run")] = 1
    fonts: Annotated[str | None, Doc("folder of .ttf and .otf files (none: the fonts that matplotlib brings)")] = None
    hash: Annotated[str, Doc("first 12 digits of the SHA-256 of all drawings; any: not checked")] = "any"

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            found = self.drawings
        except DatasetError:
            return  # `resolve_sizes` reports this error
        raise_first(
            DatasetError,
            (
                self.classes > len(found.characters),
                f"at size={self.size} the fonts share {len(found.characters)} characters that look different in every "
                f"face, so classes={self.classes} is not possible; ask for fewer, or give other fonts",
            ),
            (
                self.hash not in ("any", found.hash),
                f"the drawings have the hash {found.hash} instead of {self.hash}, because the fonts or the version of "
                "Pillow differ; restore them, or leave out hash and start a new run",
            ),
        )
        self.hash = found.hash

    @functools.cached_property
    def drawings(self) -> Drawings:
        """Return the drawings of all characters in all faces.

        Raises:
            DatasetError: they cannot be made; the message is one sentence for the user.
        """
        return drawings_of(self.fonts, self.size)

    @property
    @override
    def num_classes(self) -> int:
        return self.classes

    @property
    @override
    def image_size(self) -> int:
        return self.size

    @override
    def augment(self, inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return rotate_scale_shear_shift(inputs[:, :1], generator).expand_as(inputs)  # all channels are equal

    @override
    def warnings(self) -> list[str]:
        return note_of(self.component_name, fonts_in(Path(self.fonts))[1]) if self.fonts else []

    @override
    def sizes(self) -> tuple[int, int]:
        if not self.is_present(Path()):
            return 0, 0
        return len(self.drawings.training) * self.classes, len(self.drawings.held_out) * self.classes

    @override
    def resolve_sizes(self, train_size: int | None, test_size: int | None) -> tuple[int, int]:
        _ = self.drawings  # raises an error that says what is missing
        return super().resolve_sizes(train_size, test_size)

    @override
    def is_present(self, data_dir: Path) -> bool:
        with contextlib.suppress(DatasetError):
            return bool(self.drawings)
        return False

    @override
    def status(self, data_dir: Path) -> str:
        try:
            found = self.drawings
        except DatasetError as reason:
            return str(reason)
        return (
            f"{self.classes} of {len(found.characters)} characters, {len(found.training)} training and "
            f"{len(found.held_out)} held-out faces, hash {found.hash}"
        )

    @override
    def prepare(self, data_dir: Path) -> None:
        _ = self.drawings  # raises an error that says what is missing

    @override
    def load(
        self, data_dir: Path, *, seed: int, train_size: int | None = None, test_size: int | None = None
    ) -> tuple[Samples, Samples]:
        sizes = self.resolve_sizes(train_size, test_size)
        pixels = self.drawings.pixels()[:, self._chosen()]
        cut = len(self.drawings.training)
        train, test = (
            self._samples(part).subset(size) for part, size in zip((pixels[:cut], pixels[cut:]), sizes, strict=True)
        )
        return train, test

    def _samples(self, pixels: np.ndarray) -> Samples:
        faces, classes, *_ = pixels.shape
        grey = torch.from_numpy(pixels).flatten(0, 1).unsqueeze(1)
        return Samples(inputs=grey.expand(-1, 3, -1, -1), targets=torch.arange(classes).repeat(faces))

    def _chosen(self) -> list[int]:
        """Return the places of the chosen characters in `drawings.characters`, in the order of the classes."""

        def lot(place: int) -> bytes:
            return hashlib.sha256(f"{self.class_seed}/{ord(self.drawings.characters[place])}".encode()).digest()

        return sorted(range(len(self.drawings.characters)), key=lot)[: self.classes]
