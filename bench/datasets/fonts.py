"""Draw the characters that a set of fonts share, once per machine, and say which fonts are held out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from bench.core.errors import UsageError
from bench.core.files import locked, replacing
from bench.core.functions import HASH_DIGITS
from bench.datasets.base import DatasetError
from bench.datasets.folders import UNREADABLE, LeftOut, Listing, find_files, note_of

_ENDINGS = (".ttf", ".otf")
_FORMAT = 1  # raise it when the same fonts give other drawings, so that older files of the cache are not used
_CHANGE_FONTS = "give a folder of .ttf or .otf files as glyphs:fonts=FOLDER"
_NO_CHARACTER = "\U0010ffff"  # fonts draw it as the box that stands for missing characters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawings:
    """Drawings of every character in every face, as they are in a file of the cache.

    Attributes:
        training: names of the faces to train on, such as "DejaVu Sans Bold", sorted.
        held_out: names of the other faces, sorted.
        characters: one character of each class, by code point.
        hash: first hexadecimal digits of the SHA-256 of the names, the characters and the pixels.
        size: side of a drawing in pixels.
        file: the file, which holds one line of JSON and the pixels.
    """

    training: Sequence[str]
    held_out: Sequence[str]
    characters: str
    hash: str
    size: int
    file: Path

    @classmethod
    def read(cls, file: Path) -> Drawings:
        """Return what the first line of a file says.

        Raises:
            FileNotFoundError: there is no file.
            ValueError, TypeError: the file is damaged.
        """
        with file.open("rb") as opened:
            return cls(**json.loads(opened.readline()), file=file)

    def pixels(self) -> np.ndarray:
        """Return all drawings: uint8 [faces, characters, size, size], training faces first, mapped from the file.

        Raises:
            DatasetError: the file is damaged.
        """
        shape = (len(self.training) + len(self.held_out), len(self.characters), self.size, self.size)
        with contextlib.suppress(OSError, ValueError), self.file.open("rb") as opened:
            opened.readline()
            # Copy on write, because torch warns of arrays that cannot be written.
            pixels = np.memmap(opened, dtype=np.uint8, mode="c", offset=opened.tell(), shape=shape)
            if self.hash == _hash([self.training, self.held_out], self.characters, pixels.data):
                return pixels
        raise DatasetError(f"the drawings in {self.file} are damaged; delete this file, and they are drawn again")


def drawings_of(folder: str | None, size: int) -> Drawings:
    """Return the drawings of a folder's fonts; draw them if no process of this machine has done so.

    Args:
        folder: folder of fonts; None: the text faces of DejaVu that are part of matplotlib.
        size: side of a drawing in pixels.

    Raises:
        DatasetError: there are no fonts, a font cannot be read, the fonts cannot be split, or the cache cannot be
            written.
    """
    found = _own_fonts() if folder is None else Path(folder).absolute()
    if not found.is_dir():
        raise DatasetError(f"there is no folder of fonts {found}; {_CHANGE_FONTS}")
    listing, left_out = fonts_in(found)
    if folder is None:
        listing = tuple(each for each in listing if _is_text_face(each[0]))
    if not listing:
        reasons = note_of(", and it", left_out)
        raise DatasetError(f"{found} holds no fonts{''.join(reasons)}; {_CHANGE_FONTS}")
    return _cached(found, listing, size)


def fonts_in(folder: Path) -> tuple[Listing, LeftOut]:
    """Return (the font files below a folder, files named like fonts and folders that are left out)."""
    files, left_out = find_files(folder)
    return (
        tuple(each for each in files if each[0].lower().endswith(_ENDINGS)),
        tuple(each for each in left_out if each[1].lower().endswith(_ENDINGS) or each[0] == UNREADABLE),
    )


def _own_fonts() -> Path:
    # Importing matplotlib would take every rank half a second.
    package = importlib.util.find_spec("matplotlib")
    return Path(package.origin if package and package.origin else "matplotlib").parent / "mpl-data/fonts/ttf"


def _is_text_face(name: str) -> bool:
    return name.startswith("DejaVu") and "Display" not in name


@functools.lru_cache(maxsize=4)
def _cached(folder: Path, listing: Listing, size: int) -> Drawings:
    versions = (_FORMAT, importlib.metadata.version("pillow"))  # Pillow brings FreeType
    key = hashlib.sha256(repr((str(folder), listing, size, versions)).encode()).hexdigest()[:HASH_DIGITS]
    file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradwire" / f"glyphs-{size}-{key}"
    try:
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
            return Drawings.read(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.with_suffix(".lock")
        lock.touch()
        with locked(lock, wait=True):  # so that only one of several processes draws
            with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
                return Drawings.read(file)
            _draw_into(file, [Face.of(folder / name) for name, _, _ in listing], size)
        return Drawings.read(file)
    except DatasetError:
        raise
    except (OSError, UsageError) as error:  # UsageError: the file system has no locks
        reason = error.strerror if isinstance(error, OSError) else error
        raise DatasetError(
            f"drawings of fonts cannot be kept in {file.parent} ({reason or error}); set XDG_CACHE_HOME to a folder "
            "that can be written and locked"
        ) from None


def _hash(faces: Sequence[Sequence[str]], characters: str, pixels: bytes | memoryview) -> str:
    digest = hashlib.sha256(json.dumps([faces, characters]).encode())
    digest.update(pixels)
    return digest.hexdigest()[:HASH_DIGITS]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Face:
    """A font file.

    Attributes:
        path: the file.
        family: the family that the font names, such as "DejaVu Sans Mono".
        style: the style that the font names, such as "Bold Oblique".
        characters: code points of the characters that the font has.
    """

    path: Path
    family: str
    style: str
    characters: Collection[int]

    @property
    def name(self) -> str:
        """Return the name of family and style."""
        return f"{self.family} {self.style}"

    @property
    def weight(self) -> str:
        """Return the style without its slant, so that an upright face and its oblique have the same weight."""
        slants = ("oblique", "italic", "slanted", "regular", "book", "roman", "normal")
        return " ".join(word for word in self.style.lower().split() if word not in slants)

    @classmethod
    def of(cls, path: Path) -> Face:
        """Read a font.

        Raises:
            DatasetError: the file is not a font.
        """
        from fontTools.ttLib import TTFont  # matplotlib depends on it; unlike matplotlib, it does not import numpy
        from PIL import ImageFont

        try:
            # Opened here, because Pillow replaces a path that it cannot read by a font of the system with this name.
            with path.open("rb") as file:
                family, style = ImageFont.truetype(file, 16).getname()
                characters = frozenset(TTFont(file, lazy=True).getBestCmap() or ())
        except Exception as error:  # noqa: BLE001 - a damaged font leads to errors of many kinds
            raise DatasetError(f"{path} cannot be read as a font ({error}); repair or remove it") from None
        return cls(path=path, family=family or path.stem, style=style or "Regular", characters=characters)


def held_out_among(faces: Sequence[Face]) -> set[str]:
    """Return the names of the faces that are held out: those of the second of every three families, by name.

    So all styles of a family are on one side. In a single family, the second of every three weights is held out, and an
    oblique is on the side of its upright.

    Raises:
        DatasetError: the faces have one family and one weight.
    """
    for groups in ([face.family for face in faces], [face.weight for face in faces]):
        if held_out := sorted(set(groups))[1::3]:
            return {face.name for face, group in zip(faces, groups, strict=True) if group in held_out}
    raise DatasetError(
        f"the fonts in {faces[0].path.parent} are of one family and weight, {faces[0].family}, so none can be held "
        "out; add fonts of another family"
    )


def _draw_into(file: Path, found: Sequence[Face], size: int) -> None:
    """Draw all characters that the faces share, join those that look alike, and write the drawings into a file.

    Faces that draw all characters alike, such as copies of a file, count once.
    """
    shared = [chr(code) for code in sorted(set.intersection(*(set(face.characters) for face in found)))]
    if not shared:
        few = min(found, key=lambda face: len(face.characters))
        raise DatasetError(
            f"the fonts in {few.path.parent} share no character; remove fonts with few characters, such as "
            f"{few.path.name}"
        )
    by_name = sorted(found, key=lambda face: face.name)
    unique = {tuple(_drawn(face, shared, size).items()): face for face in reversed(by_name)}
    held_out = held_out_among(list(unique.values()))
    ordered = sorted(unique.items(), key=lambda item: (item[1].name in held_out, item[1].name))
    names = [[face.name for _, face in ordered if (face.name in held_out) == held] for held in (False, True)]
    drawn = [dict(drawings) for drawings, _ in ordered]
    classes = first_of_each_class(drawn)
    pixels = b"".join(each[character] for each in drawn for character in classes)
    facts = {"training": names[0], "held_out": names[1], "characters": "".join(classes), "size": size}
    facts["hash"] = _hash(names, "".join(classes), pixels)
    with replacing(file) as temporary:
        temporary.write_bytes(json.dumps(facts).encode() + b"\n" + pixels)


def _drawn(face: Face, characters: Sequence[str], size: int) -> dict[str, bytes]:
    """Return the drawing of each character, size * size grey pixels; without those that are blank or a box.

    Every character starts at the same point, as in a line of text: 3/16 of the size from the left, on a baseline a
    quarter of the size above the lower edge. An em is 3/4 of the size.
    """
    from PIL import Image, ImageDraw, ImageFont

    with face.path.open("rb") as file:
        # Pillow's other layout engine depends on a library that not every machine has.
        font = ImageFont.truetype(file, size * 3 // 4, layout_engine=ImageFont.Layout.BASIC)

    def draw(character: str) -> bytes:
        image = Image.new("L", (size, size))
        start = size * 3 // 16, size * 3 // 4
        ImageDraw.Draw(image).text(start, character, fill=255, font=font, anchor="ls")
        return image.tobytes()

    nothing = {bytes(size * size), draw(_NO_CHARACTER)}
    found = {character: draw(character) for character in characters}
    return {character: pixels for character, pixels in found.items() if pixels not in nothing}


def first_of_each_class(drawn: Sequence[Mapping[str, bytes]]) -> list[str]:
    """Return the first character of each class, by code point.

    Characters that any face draws alike are of one class. Characters that a face does not draw are left out.

    Args:
        drawn: for each face, the drawing of each character.
    """
    in_all = sorted(set.intersection(*(set(each) for each in drawn)))
    earlier: dict[str, str] = {}  # of a character that is not the first of its class, another character of the class

    def first(character: str) -> str:
        while character in earlier:
            character = earlier[character]
        return character

    for each in drawn:
        alike: dict[bytes, str] = {}
        for character in in_all:
            one, other = sorted((first(alike.setdefault(each[character], character)), first(character)))
            if one != other:
                earlier[other] = one
    return [character for character in in_all if character not in earlier]
