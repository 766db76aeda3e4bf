"""From SOURCE to a `torch.nn.Module`: the zoo, torchvision, timm, a user's file, or an exported program.

Weights from a file are loaded elsewhere.
"""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from convoy.export.sources.torch_child import registries, ultralytics_form, untrained
from convoy.export.sources.torch_job import Description, Inquiry, TorchJob, one_line
from convoy.export.sources.user_code import call_factory
from convoy.models.errors import JobError
from convoy.models.samples import some


def build(job: TorchJob) -> torch.nn.Module:
    """The job's network, with a registry's own weights if the job asks for them. Raises JobError."""
    network = _BUILDERS[job.kind](job)
    if not isinstance(network, torch.nn.Module):
        raise JobError(f"{job.name} returned a {type(network).__name__}; it must return a torch.nn.Module")
    scripted = [name or "it" for name, one in network.named_modules() if isinstance(one, torch.jit.ScriptModule)]
    if scripted:
        which = "TorchScript" if scripted[0] == "it" else f"TorchScript in {some(scripted)}"
        raise JobError(
            f"{job.name} returned {which}, which has no way to ONNX; return the torch.nn.Module that it was made of"
        )
    return network


def channels_taken(inquiry: Inquiry) -> tuple[int, ...]:
    """Which of 3 and 1 channels the network of a user's file takes. Raises JobError if there is no network."""
    network = build(_without_weights(inquiry))
    if inquiry.kind != "pt2":  # an exported program's mode is frozen, and it refuses eval()
        network.eval()
    like = next((one for one in network.parameters() if one.is_floating_point()), torch.zeros(0))
    taken = []
    for channels in (3, 1):
        try:
            with torch.no_grad():
                network(torch.zeros(2, channels, *inquiry.size, dtype=like.dtype))
        except Exception:  # it is the user's code; the error is reported when it must run
            continue
        taken.append(channels)
    return tuple(taken)


def is_untrained(inquiry: Inquiry) -> bool:
    """Whether all weights of the network of a user's file are random. Raises JobError if there is no network."""
    job = _without_weights(inquiry)
    return untrained.is_drawn(build(job), lambda: build(job))


def described(inquiry: Inquiry) -> Description:
    """What the network of a user's file says of itself, if it is Ultralytics'. Raises JobError if there is none."""
    return ultralytics_form.describe(build(_without_weights(inquiry)).eval(), inquiry.size)


def _without_weights(inquiry: Inquiry) -> TorchJob:
    """A job to build the network of a user's file, and nothing more."""
    return TorchJob(
        inquiry.kind,
        *(inquiry.name, inquiry.file, "network", None, None),
        uint8_front=False,
        mean=(),
        std=(),
        max_batch=1,
        threads=1,
        inline_bytes=0,
    )


def in_float32(network: torch.nn.Module) -> str:
    """Convert parameters of other precisions in place. Returns what was converted, empty if nothing.

    Every value of FP16 or BF16 is one of FP32, and the variants are made and judged from FP32.
    """
    tensors = (*network.parameters(), *network.buffers())
    others = {one.dtype for one in tensors if one.is_floating_point() and one.dtype != torch.float32}
    if not others:
        return ""
    network.float()
    return (
        f"the network, of {' and '.join(sorted(str(one).removeprefix('torch.') for one in others))}, was made float32"
    )


def in_form_for_inference(network: torch.nn.Module) -> str:
    """Let every part with a `reparameterize()` fold itself, in place. Returns which did, empty if none has one.

    This is timm's name for what RepVGG, MobileOne and FastViT do, and the zoo's. A method with arguments is something
    else, as in variational autoencoders. Raises JobError if a part fails.
    """
    folded: list[str] = []
    for module in list(network.modules()):
        fold = getattr(module, "reparameterize", None)
        if not callable(fold) or not _wants_nothing(fold):
            continue
        kind = type(module).__name__
        try:
            fold()
        except Exception as error:  # it is the user's code
            raise JobError(
                f"reparameterize() of {kind} fails ({one_line(str(error)) or type(error).__name__}); mend it, or "
                "call it another name"
            ) from error
        folded.append(kind)
    network.eval()
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(folded).items()))
    return f"folded for inference by reparameterize(): {kinds}" if folded else ""


def _wants_nothing(method: Any) -> bool:
    try:
        inspect.signature(method).bind()
    except (TypeError, ValueError):
        return False
    return True


def _from_file(job: TorchJob) -> Any:
    assert job.file is not None
    network = ultralytics_form.unwrapped(call_factory(Path(job.file), job.name))
    if isinstance(network, torch.nn.Module):
        ultralytics_form.set_export_form(network)
    return network


def has_auxiliary(job: TorchJob) -> bool:
    """Whether the network has weights with an auxiliary head, `aux`, and some without."""
    is_segmenter = job.kind == "torchvision" and registries.torchvision_task(job.name) == "segment"
    return is_segmenter and not job.name.startswith("lraspp")


def from_torchvision(job: TorchJob, *, with_auxiliary: bool = False) -> Any:
    """One of its networks; one for segmentation possibly with its auxiliary head."""
    models, task = registries.torchvision_models(), registries.torchvision_task(job.name)
    wanted = {} if job.classes is None else {"num_classes": job.classes}
    # Published weights are complete; nothing is downloaded for one part.
    own: dict[str, Any] = {} if task == "classify" else {"weights_backbone": None}
    if with_auxiliary or (job.weights_from == "registry" and has_auxiliary(job)):
        own["aux_loss"] = True  # the auxiliary head of published weights
    network = models.get_model(job.name, weights=None, **own, **wanted)
    if job.weights_from == "registry":
        _fill(network, models.get_model_weights(job.name).DEFAULT, job)
    return network


def _from_timm(job: TorchJob) -> Any:
    timm = registries.timm_with(job.name)
    wanted = {} if job.classes is None else {"num_classes": job.classes}
    if job.weights_from != "registry":
        return timm.create_model(job.name, pretrained=False, exportable=True, **wanted)
    try:
        return timm.create_model(job.name, pretrained=True, exportable=True, **wanted)
    except Exception as error:  # from the hub, its cache and its file formats
        raise _not_downloaded(job, error) from error


def _from_archive(job: TorchJob) -> Any:
    assert job.file is not None
    file = Path(job.file)
    try:
        return torch.export.load(file).module()
    except Exception as error:  # from zip, pickle, JSON and torch alike
        why = one_line(str(error)) or type(error).__name__
        raise JobError(
            f"{file.name} is not a program of torch.export that this torch can read ({why}); save it again with "
            "torch.export.save"
        ) from error


_BUILDERS = {
    "zoo": lambda job: importlib.import_module("convoy.models.zoo").create(job.name, job.classes),
    "torchvision": from_torchvision,
    "timm": _from_timm,
    "file": _from_file,
    "pt2": _from_archive,
}


def _fill(network: torch.nn.Module, published: Any, job: TorchJob) -> None:
    try:
        found = published.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except Exception as error:  # network, disk and hash errors share no base class
        raise _not_downloaded(job, error) from error
    try:
        network.load_state_dict(found)
    except RuntimeError as error:
        raise JobError(
            f"the published weights of {job.name} have other classes than --labels names ({job.classes}); leave "
            "--labels out, or pass --weights FILE"
        ) from error


def _not_downloaded(job: TorchJob, error: Exception) -> JobError:
    why = one_line(str(error)) or type(error).__name__
    return JobError(f"the weights of {job.kind}:{job.name} cannot be downloaded ({why}); pass --weights FILE")
