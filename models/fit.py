"""How a network learns from images on one device.

On a GPU: page-locked host memory and copies that overlap with compute and, by default, automatic mixed precision
(bfloat16, or float16 with loss scaling if the chip lacks it) and channels_last. On a CPU these two pay only on some
processors, so they are optional, as is a compiled network everywhere.

Sources of the method: AdamW (Loshchilov and Hutter, 2019), label smoothing (Szegedy et al., 2016), averaged weights
(Polyak and Juditsky, 1992); for learning rates see `convoy.models.training.schedule`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from convoy.models.errors import FormRefused
from convoy.models.train_options import Layout, TrainPrecision
from convoy.models.training.epochs import EpochRecord
from convoy.models.training.feed import Feed
from convoy.models.training.meters import EnergyMeter, peak_memory_bytes, start_peak
from convoy.models.training.objectives import Classes, Evaluation, Objective
from convoy.models.training.schedule import Schedule, factor
from convoy.models.weights.versions import versions_of, with_versions


@dataclass(frozen=True, slots=True)
class FitPlan:
    """How to learn. `optimizer` is "adamw" or "sgd"; `mean` and `std` are per channel, for values from 0 to 1.

    `warm_up` is a fraction of the run. `class_weights` has one loss factor per class; None means equal weights.
    `ema_decay` None means that weights are not averaged over steps. `trained` names the parameters that learn, None
    means all; if it is given, the rest of the network is frozen, with its running statistics. `precision` is that of
    the forward pass; the weights are fp32.
    """

    optimizer: str
    learning_rate: float
    batch_size: int
    evaluation_batch: int
    epochs: int
    seed: int
    precision: TrainPrecision
    mirror: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    weight_decay: float
    label_smoothing: float
    schedule: Schedule
    warm_up: float
    ema_decay: float | None
    class_weights: tuple[float, ...] | None
    trained: frozenset[str] | None = None
    channels_last: bool = False
    is_compiled: bool = False


class KeptEpoch(NamedTuple):
    """The best epoch so far, and the network's state after it, on the host."""

    record: EpochRecord
    weights: dict[str, Tensor]


def choose_device(wanted: str) -> torch.device:
    """Choose a device; "auto" is the GPU if there is one. Raises FormRefused if a requested GPU is missing."""
    present = torch.cuda.is_available()
    if wanted == "cuda" and not present:
        raise FormRefused("torch finds no usable GPU; train with --device cpu")
    return torch.device("cuda" if present and wanted != "cpu" else "cpu")


def mixed_precision(device: torch.device) -> TrainPrecision:
    """The precision of `--amp` on this device: bf16, or fp16 on a GPU without it."""
    if device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    return "fp16"


def seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """Call `build` with torch's random state at `seed`, and restore the state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


@contextmanager
def _threads_for(network: nn.Module) -> Iterator[None]:
    """Use one torch thread while a small network learns, otherwise the usual number."""
    before = torch.get_num_threads()
    # Below this many parameters, a step ends before a second thread has woken up. If other programs use the cores,
    # waiting threads made such a step more than ten times slower.
    small = sum(parameter.numel() for parameter in network.parameters()) < 200_000
    torch.set_num_threads(1 if small else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Trainer:
    """One network on one device, trained by `plan`. `records` are the finished epochs, `kept` is the best of them.

    `objective` None means classes, as the plan says. Raises FormRefused if torch cannot compile here.
    """

    def __init__(
        self, network: nn.Module, plan: FitPlan, device: torch.device, objective: Objective | None = None
    ) -> None:
        self.plan = plan
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._layout = torch.channels_last if plan.channels_last else torch.contiguous_format
        self._network = network.to(device).to(memory_format=self._layout)
        self._mean = torch.tensor(plan.mean, device=device).reshape(1, -1, 1, 1)
        self._std = torch.tensor(plan.std, device=device).reshape(1, -1, 1, 1)
        self._amp_dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[plan.precision]
        self._scaler = torch.amp.GradScaler(device.type, enabled=self._amp_dtype == torch.float16)
        self._optimizer = _optimizer(self._network, plan)
        self._generator = torch.Generator().manual_seed(plan.seed)
        weight = None if plan.class_weights is None else torch.tensor(plan.class_weights, device=device)
        self._objective = objective or Classes(weight, plan.label_smoothing, mirror=plan.mirror)
        self._average = None if plan.ema_decay is None else _average(self._network, plan.ema_decay)
        # The network itself is measured, averaged and written, so names and results are those of any run.
        self._learner: Callable[..., Any] = _compiled(self._network) if plan.is_compiled else self._network
        self._has_stepped = False
        self._dropout_state: dict[str, Tensor] = {}
        self._energy = EnergyMeter(device)
        self.records: list[EpochRecord] = []
        self.kept: KeptEpoch | None = None

    @property
    def layout(self) -> Layout:
        """The memory layout of images and weights."""
        return "channels_last" if self.plan.channels_last else "contiguous"

    def fit(self, training: Feed, validation: Feed | None, on_epoch: Callable[[EpochRecord], None]) -> None:
        """Train for all remaining epochs, and report each after updating `kept`.

        Raises FormRefused if the loss is not a number, the GPU's memory is not enough, or the network does not compile.
        """
        with _threads_for(self._network), self._dropout_apart():
            steps = math.ceil(len(training.labels) / self.plan.batch_size)
            schedule = self._schedule(steps)
            for epoch in range(len(self.records), self.plan.epochs):
                try:
                    record = self._measured(epoch, training, validation, schedule)
                except torch.OutOfMemoryError as error:
                    raise FormRefused(
                        f"batches of {self.plan.batch_size} exceed the GPU's memory; lower --batch-size"
                    ) from error
                if not math.isfinite(record.loss):
                    raise FormRefused(f"training diverged in epoch {epoch + 1}; lower --lr {self.plan.learning_rate:g}")
                if self.kept is None or record.is_better_than(self.kept.record):
                    self.kept = KeptEpoch(record, _on_host(self._answering.state_dict()))
                self.records.append(record)
                self._dropout_state = self._drawn()
                on_epoch(record)

    def evaluate(self, feed: Feed) -> Evaluation:
        """Evaluate on all images of `feed`, with the current weights."""
        network = self._answering
        network.eval()
        tally = self._objective.tally()
        with torch.inference_mode():
            for batch in feed.batches(torch.split(torch.arange(len(feed.labels)), self.plan.evaluation_batch)):
                pixels, wanted = self._on_device(batch)
                tally.add(network(self._normalised(pixels)), wanted)
        return tally.evaluation()

    def take_kept(self) -> KeptEpoch:
        """Load the weights of the best epoch into the network, and return it."""
        assert self.kept is not None, "no epoch has finished"
        self._answering.load_state_dict(self.kept.weights)
        return self.kept

    def weights(self) -> dict[str, npt.NDArray[np.generic]]:
        """The network's state as numpy arrays, by name."""
        return {name: tensor.cpu().numpy() for name, tensor in self._answering.state_dict().items()}

    def state(self) -> dict[str, Any]:
        """Everything needed to continue after an epoch: tensors, numbers and texts, in dicts and lists."""
        assert self.kept is not None, "no epoch has finished"
        return {
            "network": self._network.state_dict(),
            "average": None if self._average is None else self._average.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "generator": self._generator.get_state(),
            "dropout": self._dropout_state,
            "kept": self.kept.weights,
        }

    def restore(self, state: dict[str, Any], records: Sequence[EpochRecord], kept: EpochRecord) -> None:
        """Continue from a `state`. Raises RuntimeError or ValueError if it belongs to another network."""
        self._network.load_state_dict(state["network"])
        if self._average is not None:
            self._average.load_state_dict(state["average"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])
        self._generator.set_state(state["generator"])
        self._dropout_state = state["dropout"]
        self.records = list(records)
        self.kept = KeptEpoch(kept, state["kept"])

    @property
    def _answering(self) -> nn.Module:
        """The network that is measured and kept."""
        return self._network if self._average is None else self._average.module

    def _schedule(self, steps: int) -> LambdaLR:
        """torch's scheduler with our curve, at the first step that is not done."""
        plan, done = self.plan, len(self.records) * steps
        for group in self._optimizer.param_groups:
            group["initial_lr"] = plan.learning_rate

        def rate(step: int) -> float:
            return factor(plan.schedule, (step // steps + step % steps / steps) / plan.epochs, plan.warm_up)

        return LambdaLR(self._optimizer, rate, last_epoch=done - 1)

    def _measured(self, epoch: int, training: Feed, validation: Feed | None, schedule: LambdaLR) -> EpochRecord:
        start_peak(self._device)
        self._energy.start()
        rate, started_s = float(schedule.get_last_lr()[0]), time.perf_counter()
        loss = self._epoch(training, schedule)
        epoch_s = time.perf_counter() - started_s
        energy_j = self._energy.used_j()
        seen = None if validation is None else self.evaluate(validation)
        return EpochRecord(
            epoch=epoch + 1,
            learning_rate=rate,
            loss=loss,
            validation_loss=None if seen is None else seen.loss,
            validation_accuracy=None if seen is None else seen.accuracy,
            epoch_s=epoch_s,
            images_per_s=len(training.labels) / epoch_s,
            peak_memory_bytes=peak_memory_bytes(self._device),
            energy_j=energy_j,
        )

    def _epoch(self, training: Feed, schedule: LambdaLR) -> float:
        """One pass over all images in random order. Returns the mean loss. Waits for the device once, at the end."""
        self._network.train(self.plan.trained is None)
        images = len(training.labels)
        order = torch.split(torch.randperm(images, generator=self._generator), self.plan.batch_size)
        total = torch.zeros((), device=self._device)
        for batch in training.batches(order):
            pixels, wanted = self._on_device(batch)
            # Compiling again for the smaller last batch would cost more than the step.
            network = self._learner if len(wanted) == min(self.plan.batch_size, images) else self._network
            total += self._first_step(network, pixels, wanted) * len(wanted)
            schedule.step()
        return total.item() / images

    def _first_step(self, network: Callable[..., Any], pixels: Tensor, wanted: Tensor) -> Tensor:
        """A step. The first one with a compiled network compiles it, which is nearly all that can fail."""
        if self._has_stepped or network is self._network:
            return self._step(network, pixels, wanted)
        try:
            loss = self._step(network, pixels, wanted)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, OSError) as error:
            raise _does_not_compile(error) from error
        self._has_stepped = True
        return loss

    def _step(self, network: Callable[..., Any], pixels: Tensor, wanted: Tensor) -> Tensor:
        pixels, wanted = self._objective.distorted(pixels, wanted, self._generator)
        inputs = self._normalised(pixels)
        with self._autocast():
            loss = self._objective.loss(network(inputs), wanted)
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(self._scaler.scale(loss))
        self._scaler.step(self._optimizer)
        self._scaler.update()
        if self._average is not None:
            self._average.update_parameters(self._network)
        return loss.detach()

    def _on_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Copy images to the device, as float [n, C, H, W] from 0 to 1, and their targets."""
        images, wanted = batch
        if self._on_gpu:
            # Page-locked memory lets the copy overlap with the previous batch's kernels; it is copied as uint8.
            images, wanted = images.pin_memory(), wanted.pin_memory()
        pixels = images.to(self._device, non_blocking=self._on_gpu).permute(0, 3, 1, 2)
        return pixels.float() / 255, wanted.to(self._device, non_blocking=self._on_gpu)

    def _normalised(self, pixels: Tensor) -> Tensor:
        return ((pixels - self._mean) / self._std).contiguous(memory_format=self._layout)

    def _autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self._amp_dtype is None else torch.autocast(self._device.type, self._amp_dtype)

    @contextmanager
    def _dropout_apart(self) -> Iterator[None]:
        """Let random layers use torch's own random state: from the seed, or from where an earlier run stopped."""
        with torch.random.fork_rng(devices=[self._device] if self._on_gpu else []):
            torch.manual_seed(self.plan.seed)
            if "cpu" in self._dropout_state:
                torch.set_rng_state(self._dropout_state["cpu"])
            if self._on_gpu and "cuda" in self._dropout_state:
                torch.cuda.set_rng_state(self._dropout_state["cuda"], self._device)
            yield

    def _drawn(self) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self._on_gpu:
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return states


def _on_host(state: dict[str, Any]) -> dict[str, Tensor]:
    """A copy that later steps do not change."""
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
    return with_versions(copies, versions_of(state))


def _average(network: nn.Module, decay: float) -> AveragedModel:
    average: Any = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    return AveragedModel(network, multi_avg_fn=average, use_buffers=True)


def _compiled(network: nn.Module) -> Callable[..., Any]:
    """Compile the network, sharing all parameters. It is compiled for one batch size at its first call."""
    # torch limits compilations per class and then silently runs further networks uncompiled.
    torch.compiler.reset()
    try:
        compiled: Callable[..., Any] = torch.compile(network, dynamic=False)
    except RuntimeError as error:  # not on this platform, or not with this Python
        raise _does_not_compile(error) from error
    return compiled


def _does_not_compile(error: Exception) -> FormRefused:
    # After the first paragraph torch explains how to log more, which is of no use here.
    why = " ".join(str(error).strip().split("\n\n")[0].split())[:200] or type(error).__name__
    return FormRefused(f"torch.compile does not work here: {why}; train without it")


def _optimizer(network: nn.Module, plan: FitPlan) -> torch.optim.Optimizer:
    if plan.trained is not None:
        for name, parameter in network.named_parameters():
            parameter.requires_grad = name in plan.trained
    weights = [parameter for parameter in network.parameters() if parameter.requires_grad]
    if plan.optimizer == "sgd":
        return torch.optim.SGD(weights, plan.learning_rate, momentum=0.9, nesterov=True, weight_decay=plan.weight_decay)
    return torch.optim.AdamW(weights, plan.learning_rate, weight_decay=plan.weight_decay)
