"""One job of the child: build a network, load its weights, answer the samples, and write an ONNX file."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load, save

from convoy.export.sources import torch_job as files
from convoy.export.sources.torch_child import graph, networks, outputs, registries, untrained
from convoy.export.sources.torch_job import IN, NOISE, OUT, TorchJob, TorchOutcome, one_line
from convoy.models.errors import ConvoyError, JobError
from convoy.models.tasks import DetectionOutputs
from convoy.models.weights.reading import fitted, read_weights


def export(job: TorchJob, folder: Path) -> TorchOutcome:
    """Do the job, whose samples are in `folder`. Errors that the user can fix are one line in the outcome."""
    try:
        return _export(job, folder)
    except (ConvoyError, OSError, MemoryError, RuntimeError) as error:
        return TorchOutcome(_complaint(error, folder), (), "")


def _complaint(error: BaseException, folder: Path) -> str:
    """One line for an error that the user can fix. Raises everything else again, because it is a bug."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk of {folder.parent} is full; free some space and run the command again"
    if graph.is_want_of_memory(error):
        return "the network does not fit into memory; close other programs or use a larger machine"
    if isinstance(error, ConvoyError):
        return " ".join(str(error).split())
    raise error


def _again(job: TorchJob, samples: Sequence[torch.Tensor]) -> torch.nn.Module:
    network = networks.build(job)
    graph.settle(network, job, samples)
    networks.in_float32(network)
    return _in_batches(network, job)[0]


def _in_batches(network: torch.nn.Module, job: TorchJob) -> tuple[torch.nn.Module, DetectionOutputs | None]:
    """A detector of torchvision in a form that takes batches, and how its outputs are read; others as they are.

    Raises JobError for a two-stage detector, at once: torch would try for minutes to export it.
    """
    if not any(type(one).__module__.startswith("torchvision.models.detection") for one in network.modules()):
        return network, None
    from convoy.export.sources.torch_child import detectors

    detectors.refuse_two_stages(network, job.shown)
    if not detectors.is_one_stage(network):
        return network, None
    detector = detectors.Detector(network, takes_pixels=job.kind == "file")
    return detector.eval(), detector.detection


def _fill(network: torch.nn.Module, job: TorchJob) -> str:
    """Load the file of weights. Returns the remarks about it."""
    assert job.weights is not None
    by_name = job.kind in ("zoo", "torchvision", "timm")  # these have as many outputs as there are labels
    advice = "; if only the classes are others, pass their --labels" if by_name else ""
    found = read_weights(Path(job.weights), job.weights_key)
    try:
        weights = fitted(found, network.state_dict(), advice=advice)
    except JobError:
        # A network may have its own rules for earlier names and shapes.
        if _why_not_loaded(network, found.tensors):
            raise
        return "; ".join([*(found.said or [found.file]), "an older form, which the network converted as it was loaded"])
    if why := _why_not_loaded(network, weights.tensors):
        raise JobError(f"the network refuses the weights in {found.file} ({why}); check its code that loads them")
    return weights.said


def _why_not_loaded(network: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> str:
    """The network's complaint about its new tensors; empty if it accepts them."""
    try:
        network.load_state_dict(state)
    except Exception as error:  # a part may run the user's code for it
        return one_line(str(error)) or type(error).__name__
    return ""


def _export(job: TorchJob, folder: Path) -> TorchOutcome:
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    network = networks.build(job)
    task = registries.purpose(job)
    given = load((folder / files.SAMPLES).read_bytes())
    samples = tuple(given.pop(f"{IN}{name}") for name in job.inputs)
    noise = tuple(given.pop(f"{NOISE}{name}") for name in job.inputs)
    outputs.check_names(network, job.inputs, is_program=job.kind == "pt2")
    graph.settle(network, job, samples)
    entry = ""
    if job.weights_from == "file":
        try:
            entry = _fill(network, job)
        except JobError:
            if not networks.has_auxiliary(job):
                raise
            network = networks.from_torchvision(job, with_auxiliary=True)
            entry = _fill(network, job)
    if job.kind != "pt2":  # an exported program's mode is frozen, and it refuses eval()
        network.eval()
        entry = "; ".join(filter(None, (entry, networks.in_float32(network))))
    network, detection = _in_batches(network, job)
    task = task if detection is None else "detect"
    if why_alone := graph.why_alone(network, job, samples):
        job = replace(job, is_alone=True)
    if job.refuse_random and job.kind == "file" and job.weights_from != "file":
        few = graph.normalised([one[: 1 if job.is_alone else 2] for one in samples], job)
        untrained.refuse(network, lambda: _again(job, samples), lambda one: graph.answer(one, job, few), job.shown)
    if job.weights_from == "random":
        drawn = graph.normalised([one[: 1 if job.is_alone else None] for one in samples], job)
        untrained.draw(network, lambda: outputs.call(network, job.inputs, drawn))
    reference = graph.reference(network, job, samples)
    noisy = graph.on_noise(network, job, noise)
    answers, why_fixed = graph.elsewhere(network, job, given) if job.is_free and not why_alone else ({}, "")
    if job.is_free and why_alone:
        why_fixed = "it is served one by one"
    if job.kind != "pt2":
        # After its own answers, so that the effect of folding is proved as well.
        entry = "; ".join(filter(None, (entry, networks.in_form_for_inference(network))))
    if not why_fixed and answers:
        # Sizes that differ must not look equal, if the network allows it.
        oblong = given[next(iter(answers))]
        try:
            graph.write_onnx(network, job, (oblong,), tuple(reference), folder / files.ONNX, is_free=True)
        except JobError as error:
            why_fixed = one_line(f"torch does not export them free ({error})")
    if why_fixed or not answers:
        answers = {}
        try:
            graph.write_onnx(network, job, samples, tuple(reference), folder / files.ONNX)
        except outputs.NotBatchedError as error:
            why_alone, job = str(error), replace(job, is_alone=True)
            graph.write_onnx(network, job, samples, tuple(reference), folder / files.ONNX)
    named = {f"{OUT}{name}": one for name, one in reference.items()}
    named |= {f"{NOISE}{name}": one for name, one in noisy.items()}
    named |= {f"{other}:{name}": one for other, own in answers.items() for name, one in own.items()}
    (folder / files.REFERENCE).write_bytes(save({name: one.contiguous() for name, one in named.items()}))
    if why_fixed:
        height, width = samples[0].shape[1:3] if job.uint8_front else samples[0].shape[2:]
        why_fixed = f"height and width are fixed at {height}x{width}: {why_fixed}"
    if why_alone:
        why_alone = f"cannot be batched, and is served one by one: {why_alone}"
    return TorchOutcome(None, tuple(reference), str(torch.__version__), entry, why_fixed, task, detection, why_alone)
