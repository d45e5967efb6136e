#!/usr/bin/env python3
"""Draw coloured shapes, and ask the demo model that sees about them. Nothing is downloaded.

    python examples/images.py
    python examples/images.py --seed 7 --save shapes.png      # then: rlx run demo-vision --image shapes.png "..."

The model knows drawings like these only. For others name a model: `rlx.auto_runner("gemma-3-4b-it-Q4_K_M.gguf")`, with
its mmproj file beside it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import rlx

Array = npt.NDArray[Any]
SIDE = 96
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40)}
# Whether a place at (x, y) from the centre lies inside of the shape with radius 1.
SHAPES: dict[str, Callable[[Array, Array], Array]] = {
    "circle": lambda x, y: x * x + y * y < 1,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) < 0.85,
    "diamond": lambda x, y: abs(x) + abs(y) < 1.1,
    "ring": lambda x, y: (x * x + y * y < 1) & (x * x + y * y > 0.3),
}


def draw(shapes: list[tuple[str, str]]) -> npt.NDArray[np.uint8]:
    """Up to four (colour, shape) on a dark square: uint8 [96, 96, 3]."""
    image = np.full((SIDE, SIDE, 3), 30, np.uint8)
    row, column = np.mgrid[:SIDE, :SIDE]
    for place, (colour, shape) in enumerate(shapes):
        x, y = SIDE // 4 + SIDE // 2 * (place % 2), SIDE // 4 + SIDE // 2 * (place // 2)
        image[SHAPES[shape]((column - x) / 17, (row - y) / 17)] = COLOURS[colour]
    return image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", metavar="FILE", help="write the image (needs Pillow)")
    args = parser.parse_args()
    choose = random.Random(args.seed)
    shapes = list(zip(choose.sample(list(COLOURS), 3), choose.sample(list(SHAPES), 3), strict=True))
    image = draw(shapes)
    if args.save:
        from PIL import Image

        Image.fromarray(image).save(args.save)
    print("drawn: " + ", ".join(f"a {colour} {shape}" for colour, shape in shapes))
    (colour, first), (_, second) = shapes[:2]
    questions = [f"What colour is the {second}?", f"Where is the {colour} {first}?", "What is in the picture?"]
    with rlx.auto_runner("demo-vision") as runner:
        for question in questions:
            parts = [{"type": "image", "image": image}, {"type": "text", "text": question}]
            print(f"{question} {runner.chat([{'role': 'user', 'content': parts}]).text}")


if __name__ == "__main__":
    main()
