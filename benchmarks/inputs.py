"""Write the text and the images of the runs that must repeat; their content is the same on every machine.

numpy guarantees that the numbers of `RandomState` never change.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

WORDS = "a gradient is sent in few bytes and the ranks add what they get so that all of them make one step"
IMAGES = {"train": 16, "val": 40}  # of each class


def write_inputs(root: Path) -> None:
    """Write `build/inputs/text` and `build/inputs/images` below a folder."""
    random = np.random.RandomState(1)
    text = root / "build/inputs/text/words.txt"
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text(" ".join(random.choice(WORDS.split(), 6000)), encoding="utf-8")
    for label in range(3):
        for part, number in IMAGES.items():
            folder = root / f"build/inputs/images/{part}/{label}"
            folder.mkdir(parents=True, exist_ok=True)
            for index in range(number):
                pixels = random.randint(0, 160, (36, 36, 3))
                pixels[:, :, label] += 48
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index}.png")
