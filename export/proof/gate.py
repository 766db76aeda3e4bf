"""The accuracy gate: may this variant serve, and how sure is that?

Knows the rule and its words. Measures nothing and knows no files.

    point estimate over the budget                    refused
    estimate within, bound over the budget            serves, "not proved with N images"; refused if strict
    both within the budget                            serves, proved
    no labels                                         refused: not verified on labels
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.export.proof.verify import Score
from convoy.models.bundle import TOP_1, Accuracy, Variant


@dataclass(frozen=True, slots=True)
class AccuracyGate:
    """`budget_points` of top-1 a variant may lose against fp32; `strict` wants that proved."""

    budget_points: float
    strict: bool = False

    def passes(self, accuracy: Accuracy) -> bool:
        """Whether a variant with these scores may serve."""
        return accuracy.loss_points <= self.budget_points and (accuracy.is_proved or not self.strict)

    def verdict(self, score: Score, *, real: bool = True, samples: str = "images") -> tuple[bool, str]:
        """Whether the variant may serve, and why, for people. `real`: the inputs were not random, and are `samples`."""
        accuracy = score.accuracy
        if accuracy is None:
            what = "samples" if real else "random inputs"
            return False, (
                f"not verified on labels: {score.likeness} some {what}{_by_output(score)}; "
                f"export with {score.wanted} to let it serve"
            )
        samples = samples if accuracy.metric == TOP_1 else "samples"
        loss = f"loses {accuracy.loss_points:.2f} points of {accuracy.metric} on {accuracy.images} {samples}"
        if accuracy.loss_points > self.budget_points:
            return False, f"{loss}, over the budget of {self.budget_points:g}"
        bound = "" if accuracy.loss_bound_points is None else f" (at most {accuracy.loss_bound_points:.2f} with 95 %)"
        if accuracy.is_proved:
            return True, f"{loss}{bound}, within the budget of {self.budget_points:g}"
        doubt = f"{loss}{bound}; a budget of {self.budget_points:g} is not proved with {accuracy.images} {samples}"
        return not self.strict, f"{doubt}, and --strict-gate wants it proved" if self.strict else doubt


def _by_output(score: Score) -> str:
    """The error of each output, where there are several."""
    if len(score.output_errors) < 2:
        return ""
    each = ", ".join(f"{100 * error:.2g} % in {name}" for name, error in score.output_errors.items())
    return f" (off by at most {each})"


def refused_by_name(variants: Sequence[Variant], precisions: str | None, gate: AccuracyGate) -> tuple[Variant, ...]:
    """The variants that `--precisions` names and the gate keeps out of service; not those that are only slow."""
    asked = {part.strip() for part in (precisions or "").split(",")}
    return tuple(
        variant
        for variant in variants[1:]
        if variant.precision in asked and variant.accuracy is not None and not gate.passes(variant.accuracy)
    )
