"""A whole set of drawn characters: the number of pictures and the faces of each part, and the file that keeps them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import features

from convoy.models.checkpoint import write_whole
from convoy.models.errors import JobError
from convoy.models.glyphs.drawing import CHARACTERS, DRAWING_VERSION, draw
from convoy.models.glyphs.faces import Face, installed_faces
from convoy.models.samples import Part, Pixels

# Pictures of each character. 62 times the last are more than 10,000 for testing.
PER_CHARACTER: Mapping[Part, int] = {"train": 640, "calibration": 32, "test": 164}
# Streams keep the parts apart for every seed; a part's number never changes.
_STREAMS: Mapping[Part, int] = {"train": 0, "calibration": 1, "test": 2}
MOST_PX = 128

Drawn = Mapping[Part, npt.NDArray[np.uint8]]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class GlyphSet:
    """The parameters of a set: pictures of `px` x `px`, and `training_images` per character for training.

    The other parts are in proportion. Raises JobError for what cannot be drawn.
    """

    seed: int = 0
    px: int = 32
    is_grey: bool = False
    training_images: int = PER_CHARACTER["train"]

    def __post_init__(self) -> None:
        if self.px % 2 or not 16 <= self.px <= MOST_PX:
            raise JobError(f"glyph images must have 16 to {MOST_PX} pixels per side, an even number, not {self.px}")
        if not 1 <= self.training_images <= 100_000:
            raise JobError(f"glyphs have 1 to 100000 training images of each character, not {self.training_images}")
        if not 0 <= self.seed < 2**63:
            raise JobError(f"the seed of glyphs is from 0 to 2**63 - 1, not {self.seed}")

    def images(self, part: Part) -> int:
        """The number of pictures of each character in a part, at least one."""
        return -(-PER_CHARACTER[part] * self.training_images // PER_CHARACTER["train"])


def drawn(wanted: GlyphSet, cache: Path | None, progress: Progress = lambda done, total: None) -> Drawn:
    """The pictures of each part, uint8 [characters, images, px, px, 3], read-only if they come from `cache`.

    They are drawn once and kept in that folder; None keeps nothing. Files with other names were drawn from other fonts,
    by another FreeType or by another version. `progress` is called with the number of characters done and the total.
    Raises JobError if fonts are missing or the disk refuses the file.
    """
    faces = {part: installed_faces(is_test=part == "test") for part in PER_CHARACTER}
    counts = [wanted.images(part) for part in PER_CHARACTER]
    if cache is None:
        return _parts(_draw_all(wanted, faces, progress), counts)
    path = cache / f"glyphs-{_key(wanted, faces)}.npy"
    kept = _read(path, (len(CHARACTERS), sum(counts), wanted.px, wanted.px, 3))
    if kept is None:
        kept = _draw_all(wanted, faces, progress)
        _write(path, kept)
    return _parts(kept, counts)


def _draw_all(wanted: GlyphSet, faces: Mapping[Part, tuple[Face, ...]], progress: Progress) -> Pixels:
    whole = np.empty((len(CHARACTERS), sum(map(wanted.images, faces)), wanted.px, wanted.px, 3), np.uint8)
    for index, character in enumerate(CHARACTERS):
        parts = [
            draw(
                character,
                faces[part],
                wanted.images(part),
                wanted.seed,
                _STREAMS[part],
                wanted.px,
                is_grey=wanted.is_grey,
            )
            for part in faces
        ]
        whole[index] = np.concatenate(parts)
        progress(index + 1, len(CHARACTERS))
    return whole


def _parts(whole: Pixels, counts: list[int]) -> Drawn:
    ends = np.cumsum(counts)[:-1]
    return dict(zip(PER_CHARACTER, np.split(whole, ends, axis=1), strict=True))


def _key(wanted: GlyphSet, faces: Mapping[Part, tuple[Face, ...]]) -> str:
    """A hash over everything that determines the pictures."""
    fonts = [hashlib.sha256(face.path.read_bytes()).hexdigest() for part in faces for face in faces[part]]
    said = f"{DRAWING_VERSION} {features.version('freetype2')} {wanted} {fonts}"
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _read(path: Path, shape: tuple[int, ...]) -> Pixels | None:
    """The kept pictures, memory-mapped; None if there are none or the file is incomplete."""
    try:
        kept = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return kept if kept.shape == shape and kept.dtype == np.uint8 else None


def _write(path: Path, whole: Pixels) -> None:
    file = BytesIO()
    np.save(file, whole, allow_pickle=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"cannot make the folder {path.parent}: {error.strerror}; check the path") from error
    write_whole(path, file.getvalue())
