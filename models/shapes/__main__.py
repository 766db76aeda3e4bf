"""`python -m convoy.models.shapes FOLDER`: a set as `FOLDER/{images,masks,annotations}`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from convoy.models.errors import JobError
from convoy.models.shapes.coco import write_folder
from convoy.models.shapes.shape_set import PX, TRAINING_IMAGES, ShapeSet


def main(arguments: list[str] | None = None) -> int:
    """Draw and write a set. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m convoy.models.shapes", description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write; must not be there yet")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other pictures (0)")
    parser.add_argument("--px", type=int, default=PX, help="side of a picture in pixels (%(default)s)")
    parser.add_argument("--images", type=int, default=TRAINING_IMAGES, help="training pictures (%(default)s)")
    asked = parser.parse_args(arguments)
    try:
        write_folder(asked.folder, ShapeSet(asked.seed, asked.px, asked.images))
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
