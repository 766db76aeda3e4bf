"""How a network learns from images on one device.

Knows torch, the optimisers and the device. Knows nothing of data sets, files or terminals.

On a GPU: automatic mixed precision (bfloat16, or float16 with loss scaling where the chip lacks it),
channels_last, page-locked host memory and copies that overlap with compute. On a CPU none of these pays.

Sources of the method: AdamW (Loshchilov and Hutter, 2019), one cycle of the learning rate (Smith and Topin,
2018), label smoothing (Szegedy et al., 2016).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from convoy.models.augment import distort
from convoy.models.errors import JobError

LABEL_SMOOTHING = 0.05
WARM_UP_FRACTION = 0.25
START_FACTOR = 0.04
EVALUATION_BATCH = 256
# A step of a network below this many parameters is over before a second thread has woken up. Where other
# programs want the cores too, threads that wait for each other made such a step over ten times slower.
SMALL_PARAMETERS = 200_000


@dataclass(frozen=True, slots=True)
class FitPlan:
    """How to learn. `optimizer` is "adamw" or "sgd"; `mean` and `std` are per channel, of values from 0 to 1."""

    optimizer: str
    learning_rate: float
    batch_size: int
    epochs: int
    seed: int
    mixed_precision: bool
    mirror: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]


def choose_device(wanted: str) -> torch.device:
    """ "auto" is the GPU if there is one. Raises JobError where a GPU is wanted and there is none."""
    present = torch.cuda.is_available()
    if wanted == "cuda" and not present:
        raise JobError("there is no GPU that torch can use here; train with --device cpu")
    return torch.device("cuda" if present and wanted != "cpu" else "cpu")


def seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """What `build` makes with torch's random state at `seed`; afterwards that state is as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def one_cycle(fraction: float) -> float:
    """The learning rate as a factor of its peak: a cosine up from 4 %, then a cosine down to 0.

    `fraction` is the part of all steps that is done, from 0 to 1.
    """
    if fraction < WARM_UP_FRACTION:
        return START_FACTOR + (1 - START_FACTOR) * (1 - math.cos(math.pi * fraction / WARM_UP_FRACTION)) / 2
    return (1 + math.cos(math.pi * (fraction - WARM_UP_FRACTION) / (1 - WARM_UP_FRACTION))) / 2


@contextmanager
def _threads_for(network: nn.Module) -> Iterator[None]:
    """torch's threads for as long as this network learns: one where it is small, else as many as there were."""
    before = torch.get_num_threads()
    small = sum(parameter.numel() for parameter in network.parameters()) < SMALL_PARAMETERS
    torch.set_num_threads(1 if small else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Trainer:
    """One network on one device. Images are uint8 [N, H, W, C] on the host, labels int64 [N]."""

    def __init__(self, network: nn.Module, plan: FitPlan, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._layout = torch.channels_last if self._on_gpu else torch.contiguous_format
        self._network = network.to(device).to(memory_format=self._layout)
        self._mean = torch.tensor(plan.mean, device=device).reshape(1, -1, 1, 1)
        self._std = torch.tensor(plan.std, device=device).reshape(1, -1, 1, 1)
        self._amp_dtype = _amp_dtype(plan, device)
        self._scaler = torch.amp.GradScaler(device.type, enabled=self._amp_dtype == torch.float16)
        self._optimizer = _optimizer(self._network, plan)
        self._generator = torch.Generator().manual_seed(plan.seed)

    @property
    def precision(self) -> str:
        """The precision of the forward pass: "fp32", "bf16" or "fp16"."""
        return {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[self._amp_dtype]

    def fit(
        self,
        images: npt.NDArray[np.uint8],
        labels: npt.NDArray[np.int64],
        on_epoch: Callable[[int, float], None],
    ) -> list[float]:
        """Learns for all epochs and returns the seconds that each took.

        `on_epoch` is called with the number of epochs done and the mean loss of the last. Raises JobError when
        the loss is no longer a number or the GPU's memory does not suffice.
        """
        with _threads_for(self._network):
            return self._fit(torch.from_numpy(images), torch.from_numpy(labels), on_epoch)

    def _fit(self, host_images: Tensor, host_labels: Tensor, on_epoch: Callable[[int, float], None]) -> list[float]:
        epochs_s = []
        for epoch in range(self._plan.epochs):
            started_s = time.perf_counter()
            try:
                loss = self._epoch(epoch, host_images, host_labels)
            except torch.OutOfMemoryError as error:
                raise JobError(
                    f"batches of {self._plan.batch_size} exceed the GPU's memory; lower --batch-size"
                ) from error
            epochs_s.append(time.perf_counter() - started_s)
            if not math.isfinite(loss):
                raise JobError(f"training diverged in epoch {epoch + 1}; lower --lr {self._plan.learning_rate:g}")
            on_epoch(epoch + 1, loss)
        return epochs_s

    def accuracy(self, images: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64]) -> float:
        """The fraction of images whose highest logit, in float32, is at their label."""
        self._network.eval()
        host_images, host_labels = torch.from_numpy(images), torch.from_numpy(labels)
        right = torch.zeros((), dtype=torch.int64, device=self._device)
        with torch.inference_mode():
            for chosen in torch.split(torch.arange(len(labels)), EVALUATION_BATCH):
                pixels, wanted = self._batch(host_images, host_labels, chosen)
                right += (self._network(self._normalised(pixels)).argmax(1) == wanted).sum()
        return right.item() / len(labels)

    def weights(self) -> dict[str, npt.NDArray[np.generic]]:
        """The network's state as numpy arrays, by name."""
        return {name: tensor.cpu().numpy() for name, tensor in self._network.state_dict().items()}

    def _epoch(self, epoch: int, images: Tensor, labels: Tensor) -> float:
        """One pass over all images in random order; the mean loss. Waits for the device once, at the end."""
        self._network.train()
        batches = torch.split(torch.randperm(len(labels), generator=self._generator), self._plan.batch_size)
        total = torch.zeros((), device=self._device)
        for step, chosen in enumerate(batches):
            for group in self._optimizer.param_groups:
                group["lr"] = self._plan.learning_rate * one_cycle((epoch + step / len(batches)) / self._plan.epochs)
            pixels, wanted = self._batch(images, labels, chosen)
            total += self._step(pixels, wanted) * len(chosen)
        return total.item() / len(labels)

    def _step(self, pixels: Tensor, wanted: Tensor) -> Tensor:
        inputs = self._normalised(distort(pixels, self._generator, mirror=self._plan.mirror))
        with self._autocast():
            loss = functional.cross_entropy(self._network(inputs), wanted, label_smoothing=LABEL_SMOOTHING)
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(self._scaler.scale(loss))
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return loss.detach()

    def _batch(self, images: Tensor, labels: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen images on the device, as float [n, C, H, W] from 0 to 1, and their labels."""
        batch, wanted = images[chosen], labels[chosen]
        if self._on_gpu:
            # Page-locked memory lets the copy run beside the kernels of the batch before; it crosses as uint8.
            batch, wanted = batch.pin_memory(), wanted.pin_memory()
        pixels = batch.to(self._device, non_blocking=self._on_gpu).permute(0, 3, 1, 2)
        return pixels.float() / 255, wanted.to(self._device, non_blocking=self._on_gpu)

    def _normalised(self, pixels: Tensor) -> Tensor:
        return ((pixels - self._mean) / self._std).contiguous(memory_format=self._layout)

    def _autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self._amp_dtype is None else torch.autocast(self._device.type, self._amp_dtype)


def _amp_dtype(plan: FitPlan, device: torch.device) -> torch.dtype | None:
    if not plan.mixed_precision:
        return None
    if device.type != "cuda":
        raise JobError("mixed precision needs a GPU; leave --amp out")
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def _optimizer(network: nn.Module, plan: FitPlan) -> torch.optim.Optimizer:
    weights: Iterator[nn.Parameter] = network.parameters()
    if plan.optimizer == "sgd":
        return torch.optim.SGD(weights, plan.learning_rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    return torch.optim.AdamW(weights, plan.learning_rate, weight_decay=0.05)
