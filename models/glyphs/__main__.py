"""`python -m convoy.models.glyphs FOLDER`: a set as `FOLDER/{train,calibration,test}/<character>/<number>.png`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from convoy.models.errors import JobError
from convoy.models.glyphs.drawing import CHARACTERS
from convoy.models.glyphs.glyph_set import PER_CHARACTER, GlyphSet, drawn
from convoy.models.samples import encode_png


def main(arguments: list[str] | None = None) -> int:
    """Draw and write a set. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m convoy.models.glyphs", description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write; must not be there yet")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other pictures (0)")
    parser.add_argument("--px", type=int, default=32, help="side of a picture in pixels (32)")
    parser.add_argument("--grey", action="store_true", help="without colour")
    parser.add_argument(
        "--images", type=int, default=PER_CHARACTER["train"], help="training images of each character (%(default)s)"
    )
    asked = parser.parse_args(arguments)
    try:
        write_folder(asked.folder, GlyphSet(asked.seed, asked.px, asked.grey, asked.images))
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def write_folder(folder: Path, wanted: GlyphSet) -> None:
    """Write every picture as a PNG file. Raises JobError if the folder exists, or if its file system ignores case."""
    parts = drawn(wanted, None)
    try:
        folder.mkdir(parents=True)
        for part, pictures in parts.items():
            for character, of_one in zip(CHARACTERS, pictures, strict=True):
                place = folder / part / character
                place.mkdir(parents=True)
                for number, picture in enumerate(of_one):
                    (place / f"{number:05}.png").write_bytes(encode_png(picture))
    except FileExistsError as error:
        raise JobError(
            f"{error.filename} already exists; choose a new folder, on a case-sensitive file system"
        ) from error
    except OSError as error:
        raise JobError(f"cannot write {folder}: {error.strerror}; free space there or choose another place") from error


if __name__ == "__main__":
    sys.exit(main())
