"""The targets that are tested, a store of images for all tests, and the base that each of them stands on."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.containers import Images


@pytest.fixture(scope="session")
def images() -> Iterator[Images]:
    folder = Path(tempfile.mkdtemp(prefix="convoy-images-"))
    yield Images(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def base(images: Images) -> str:
    return images.make_base()
