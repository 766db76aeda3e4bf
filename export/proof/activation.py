"""What turns a network's outputs into scores, decided by its graph and by its outputs together.

    the graph ends in          the outputs                        scores are
    softmax                    sum to one                         the outputs, as they are
    log-softmax                powers sum to one                  their softmax, which is their powers
    sigmoid                    lie in 0..1                        the outputs, as they are
    what has no bounds         any that do not sum to one         their softmax; of a single output, its sigmoid
    a clip                     sum to one                         the outputs, as they are
    arithmetic on these        sum to one, or their powers do     as above
    what says nothing          sum to one, or their powers do     as above
    what says nothing          go beyond 0..1                     as of what has no bounds

Anything else could be this or that, and a guess would be served as a probability: it is refused, and `--activation`
settles it. Knows arrays and endings; knows nothing of files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from convoy.export.proof.purpose import Purpose
from convoy.export.rows import Rows
from convoy.export.sources.ending import Ending
from convoy.models.errors import JobError
from convoy.models.spec import Activation

Look = Literal["shares", "log_shares", "within_0_1", "free"]

# What float32 sums of a few thousand shares are off by stays far below; what sums to one by chance, far above.
_TOLERANCE = 1e-3
_SHOWN: dict[Look, str] = {
    "shares": "sum to one",
    "log_shares": "are logarithms that sum to one",
    "within_0_1": "lie in 0..1 without summing to one",
    "free": "go beyond 0..1",
}
_OVERRULE = "say which with --activation softmax, sigmoid or none"


@dataclass(frozen=True, slots=True)
class Decision:
    """`reason` says for people what was found and what follows; `are_shares`: the scores are probabilities."""

    activation: Activation
    reason: str
    are_shares: bool = True


def look_of(outputs: np.ndarray) -> Look:
    """What the outputs [n, classes] of some samples are alike."""
    values = outputs.astype(np.float64)
    is_within = bool((values >= -_TOLERANCE).all() and (values <= 1 + _TOLERANCE).all())
    several = values.shape[1] > 1
    if several and is_within and _sums_to_one(values):
        return "shares"
    if several and bool((values <= _TOLERANCE).all()) and _sums_to_one(np.exp(values)):
        return "log_shares"
    return "within_0_1" if is_within else "free"


def _sums_to_one(values: np.ndarray) -> bool:
    return bool(np.abs(values.sum(axis=1) - 1).max() <= _TOLERANCE)


def decide(ending: Ending, outputs: np.ndarray, *, real: bool, samples: str = "images") -> Decision:
    """The activation for a graph with this ending that gave these `outputs` [n, classes]; `real`: not to random inputs,
    but to what is called `samples`.

    Raises JobError where neither can tell.
    """
    look, count = look_of(outputs), outputs.shape[1]
    inputs = f"{len(outputs)} {samples if real else 'random inputs'}"
    found = f"the graph ends in {ending.words}, and the outputs of {inputs} {_SHOWN[look]}"
    if count == 1 and ending.kind in ("softmax", "log_softmax"):
        raise JobError(f"{found}: a softmax of one output is always the same; take it out of the network")
    is_open = ending.kind == "unknown"
    if look == "shares" and (is_open or ending.kind in ("softmax", "clipped", "derived")):
        return Decision("none", f"{found}: they are probabilities already")
    if look == "log_shares" and ending.kind != "softmax":
        return Decision("softmax", f"{found}: a softmax of log-probabilities gives the probabilities")
    if look in ("shares", "within_0_1") and ending.kind == "sigmoid":
        each = "its probability" if count == 1 else "the probability of each class by itself"
        return Decision("none", f"{found}: {each} already")
    if (ending.kind == "unbounded" and look != "shares") or ((is_open or ending.kind == "clipped") and look == "free"):
        if count == 1:
            return Decision("sigmoid", f"{found}: one logit, whose sigmoid is the probability")
        return Decision("softmax", f"{found}: logits")
    raise JobError(f"whether the outputs are scores already cannot be told: {found}; {_OVERRULE}")


def activation_of(purpose: Purpose, reference: Rows, asked: Activation | None) -> Decision:
    """The same for maps of classes and for boxes, from what the outputs [n, ...] are alike. Raises JobError.

    The class of a pixel is that of the largest score either way; of boxes it decides what a score is, so that free ones
    are asked about.
    """
    if purpose.segmentation is not None:
        scores = reference[purpose.segmentation.class_map]
        if asked is not None or scores.ndim == 3:
            return Decision(asked or "none", f"--activation {asked}" if asked else "the classes of pixels themselves")
        look = look_of(np.moveaxis(scores, 1, -1).reshape(-1, scores.shape[1]))
        found: Activation = (
            "none" if look in ("shares", "within_0_1") else "softmax" if scores.shape[1] > 1 else "sigmoid"
        )
        return Decision(found, f"the scores of each pixel {_SHOWN[look]}")
    if purpose.detection is not None:
        name = purpose.detection.scores
        look = look_of(reference[name].reshape(-1, reference[name].shape[-1]))
        if asked is None and look in ("free", "log_shares"):
            raise JobError(
                f"whether the scores of boxes in {name} are logits of a softmax or of sigmoids cannot be told; "
                f"{_OVERRULE}"
            )
        return Decision(asked or "none", f"--activation {asked}" if asked else f"the scores of boxes {_SHOWN[look]}")
    if asked not in (None, "none"):
        raise JobError(
            f"--activation {asked} makes scores of outputs, and the task is none; pass --task, or leave it out"
        )
    return Decision("none", "outputs are answered as they are", are_shares=False)


def overruled(
    activation: Activation,
    ending: Ending,
    outputs: np.ndarray,
    *,
    real: bool,
    samples: str = "images",
    why: str = "",
) -> Decision:
    """What `--activation` says, or `why`, and what would have been found. Raises JobError for what has no meaning."""
    if activation == "softmax" and outputs.shape[1] == 1:
        raise JobError("the network has one output, whose softmax is always 1; pass --activation sigmoid or none")
    try:
        found = decide(ending, outputs, real=real, samples=samples)
        beside = f"without it: {found.activation}, for {found.reason}"
    except JobError as error:
        beside = f"without it: undecided, for {str(error).removesuffix(f'; {_OVERRULE}')}"
    are_shares = activation != "none" or look_of(outputs) in ("shares", "within_0_1")
    return Decision(activation, f"{why or f'--activation {activation}'}; {beside}", are_shares)
