"""torch by itself, as an outside yardstick: eager, its tensors on the device already, nothing copied."""

from __future__ import annotations

import time
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from convoy.models.bundle import Precision
from tests.gpu.proof.bare import Effort
from tests.gpu.proof.records import Yardstick
from tests.gpu.proof.subjects import Subject
from tests.gpu.proof.torch_engine import with_front

_IN_A_ROW = 5


def measure_torch(
    torch: Any, device: str, subject: Subject, sizes: tuple[int, ...], effort: Effort
) -> Iterator[Yardstick]:
    """One row for each precision and batch size."""
    precisions: tuple[Precision, ...] = ("fp32", "fp16")
    for precision in precisions:
        network = with_front(torch, deepcopy(subject.make_network()), subject.spec, precision).to(device)
        for size in sizes:
            images = torch.from_numpy(subject.random[:size]).to(device)
            yield Yardstick(subject.name, precision, len(images), _images_per_s(torch, network, images, effort))


def _images_per_s(torch: Any, network: Any, images: Any, effort: Effort) -> float:
    with torch.inference_mode():
        _rounds(torch, network, images, effort.warm_up_s)
        return _rounds(torch, network, images, effort.row_s / 2)


def _rounds(torch: Any, network: Any, images: Any, seconds: float) -> float:
    began_s, done = time.monotonic(), 0
    while not done or time.monotonic() < began_s + seconds:
        for _ in range(_IN_A_ROW):
            network(images)
        torch.cuda.synchronize()
        done += _IN_A_ROW
    return done * len(images) / (time.monotonic() - began_s)
