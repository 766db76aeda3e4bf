"""Images that processes decode while the network learns: the same weights, and one line where something breaks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import training_fixtures
from training_fixtures import write_coloured

from convoy.models.errors import JobError, UsageError
from convoy.models.train import TrainProgress, train

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_coloured(tmp_path / "images", {"red": 100, "blue": 100}, size=(14, 18), noise=200, tint=30)


options = partial(training_fixtures.options, epochs=2, validation="0.2", loader_workers=1)


@pytest.mark.long
def test_workers_change_nothing_of_what_is_learned(folder: Path) -> None:
    import torch

    (folder / "red" / "broken.png").write_bytes(b"broken 1")  # by its hash in the train part
    state = torch.random.get_rng_state()
    with_workers = train(options(folder))
    content = with_workers.out.read_bytes()
    assert with_workers.skipped == ("red/broken.png",)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert train(replace(options(folder), loader_workers=0)).out.read_bytes() == content


@pytest.mark.long
def test_an_image_that_breaks_while_the_network_learns_is_named(folder: Path) -> None:
    def break_all(progress: TrainProgress) -> None:
        if progress.stage == "training" and progress.done == 1:
            for path in folder.glob("*/*.png"):
                path.write_bytes(b"broken")

    with pytest.raises(JobError, match=r"could be read before can be no longer: .*\.png") as caught:
        train(options(folder), break_all)
    assert "\n" not in str(caught.value)


def test_a_number_of_processes_that_cannot_be_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="--loader-workers must be from 0"):
        replace(options(folder), loader_workers=-1)
