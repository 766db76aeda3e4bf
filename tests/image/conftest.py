"""A store of images for all tests, the base that each of them stands on, and a container of a module's `image`.

Where `make image-test` asks for them, they fail without the tools; else they are skipped.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.containers import TARGETS_NAMED_BY, Container, Images, why_not
from tests.support.servers import Server


@pytest.fixture(scope="session")
def images() -> Iterator[Images]:
    if (reason := why_not()) is not None:
        (pytest.fail if TARGETS_NAMED_BY in os.environ else pytest.skip)(reason)
    folder = Path(tempfile.mkdtemp(prefix="convoy-images-"))
    yield Images(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def base(images: Images) -> str:
    return images.make_base()


@pytest.fixture(scope="module")
def container(images: Images, image: str) -> Iterator[Container]:
    with images.container(image) as made:
        yield made


@pytest.fixture(scope="module")
def server(container: Container) -> Iterator[Server]:
    with container.serving() as started:
        yield started
