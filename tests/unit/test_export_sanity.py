"""The reference itself: against chance, against what is said of it, and against the order of the labels."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.export.proof.outcomes import Outcomes, at_least, at_most
from convoy.export.proof.sanity import Claim, Expectations, Sanity, judge_reference
from convoy.export.variants.calibrate import drift_of

TEN = tuple("abcdefghij")


def outcomes(labels: np.ndarray, top1: np.ndarray) -> Outcomes:
    count = len(labels)
    return Outcomes(labels, top1, labels == top1, np.zeros(count), np.ones(count), np.arange(count))


def judged(labels: np.ndarray, top1: np.ndarray, names: tuple[str, ...] = TEN, **expected: object) -> Sanity:
    return judge_reference(outcomes(labels, top1), names, Expectations(**expected))  # type: ignore[arg-type]


def good_network(accuracy: float, *, classes: int = 10, count: int = 400, seed: int = 0) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    wrong = (labels + generator.integers(1, classes, count)) % classes
    return labels, np.where(generator.random(count) < accuracy, labels, wrong)


@given(st.integers(0, 60), st.integers(1, 60), st.floats(0.01, 0.99))
def test_the_tails_are_the_binomial_distributions(hits, trials, share):
    hits = min(hits, trials)
    assert at_least(hits, trials, share) == pytest.approx(scipy.stats.binom.sf(hits - 1, trials, share), abs=1e-9)
    assert at_most(hits, trials, share) == pytest.approx(scipy.stats.binom.cdf(hits, trials, share), abs=1e-9)


@pytest.mark.parametrize("accuracy", [0.25, 0.6, 0.98])
def test_a_network_that_has_learned_something_passes(accuracy):
    found = judged(*good_network(accuracy))
    assert found.objections == ()
    assert "where guessing would get" in found.findings[0]


def test_random_networks_pass_as_seldom_as_the_level_says():
    passed = 0
    for seed in range(300):
        generator = np.random.default_rng(seed)
        labels = np.arange(400) % 10
        # As untrained networks do: a few classes get most of the images.
        top1 = generator.choice(10, 400, p=generator.dirichlet(np.full(10, 0.3)))
        passed += judged(labels, top1).objections == ()
    assert passed <= 10


def test_the_same_answer_to_every_image_is_chance_however_uneven_the_classes_are():
    labels = np.array([0] * 380 + [1] * 20)
    (objection,) = judged(labels, np.zeros(400, np.int64), ("good", "bad")).objections
    assert (
        "95.00 % of 400 images are right, where guessing would get 95.00 %: not significantly better than chance"
        in objection
    )
    # Fewer right than by always answering "good", and yet of use: it finds every bad one.
    useful = np.concatenate([np.zeros(350, np.int64), np.ones(50, np.int64)])
    assert judged(labels, useful, ("good", "bad")).objections == ()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("classes", [2, 10, 100])
def test_a_poor_network_is_not_taken_for_mixed_up_labels(seed, classes):
    names = tuple(map(str, range(classes)))
    found = judged(*good_network(0.4 if classes > 2 else 0.7, classes=classes, seed=seed), names)
    assert found.objections == ()


def test_what_the_checkpoint_says_of_the_same_images_must_hold_but_for_the_margin():
    labels, top1 = good_network(0.9)
    top1 = np.where(np.arange(400) < 360, labels, (labels + 1) % 10)
    claims = {percent: (Claim(percent, "the header", same_images=True),) for percent in (91.2, 91.3)}
    # 90.2 % would be 360.8 images, and two libraries may differ about one.
    assert judged(labels, top1, claims=claims[91.2]).objections == ()
    (objection,) = judged(labels, top1, claims=claims[91.3]).objections
    assert "the header says 91.30 %, on the same images; 90.00 % of 400 images are right; check --pre" in objection


@given(st.integers(1, 5000), st.data())
def test_with_no_margin_one_image_is_forgiven_and_rounding_is_none(count, data):
    right = data.draw(st.integers(0, count))
    labels = np.arange(count) % 10
    answered = np.where(np.arange(count) < right, labels, (labels + 1 + np.arange(count) // 10 % 9) % 10)
    for stated in (right, min(right + 1, count)):
        claim = Claim(100 * (stated / count), "the header", same_images=True)
        found = judged(labels, answered, claims=(claim,), margin_points=0.0, untrained=True)
        assert found.objections == ()
    if right + 2 <= count:
        claim = Claim(100 * ((right + 2) / count), "the header", same_images=True)
        assert judged(labels, answered, claims=(claim,), margin_points=0.0, untrained=True).objections


def test_what_is_said_of_other_images_is_tested_and_not_compared():
    labels = np.arange(400) % 10
    top1 = np.where(np.arange(400) < 350, labels, (labels + 1) % 10)
    # 87.5 % of 400: the lower 1 % of what 92 % would give begins at 88.5 %, that of 90 % at 86 %.
    assert judged(labels, top1, claims=(Claim(91, "--expect-accuracy"),)).objections == ()
    assert len(judged(labels, top1, claims=(Claim(93, "--expect-accuracy"),)).objections) == 1
    assert judged(labels, top1, min_percent=87.5).objections == ()
    assert len(judged(labels, top1, min_percent=87.6).objections) == 1


def test_random_weights_are_expected_to_guess_and_held_to_what_was_asked_all_the_same():
    labels, top1 = np.arange(400) % 10, np.zeros(400, np.int64)
    assert judged(labels, top1, untrained=True).objections == ()
    assert len(judged(labels, top1, untrained=True, min_percent=50).objections) == 1


def test_a_first_look_does_not_hold_a_sample_to_what_was_measured_on_all():
    labels = np.arange(512) % 10
    claim = Expectations(claims=(Claim(75.0, "the header", same_images=True),))
    for right, is_refused in ((370, False), (300, True)):
        one = outcomes(labels, np.where(np.arange(512) < right, labels, (labels + 1 + np.arange(512) // 10 % 9) % 10))
        assert bool(judge_reference(one, TEN, claim, is_sample=True).objections) == is_refused
        assert judge_reference(one, TEN, claim).objections


@pytest.mark.parametrize("is_sample", [False, True])
@pytest.mark.parametrize(("count", "right"), [(10, 9), (10, 7), (20, 15), (30, 21)])
def test_few_images_do_not_refuse_a_network_that_may_be_good(count, right, is_sample):
    labels = np.arange(count) % 2
    one = outcomes(labels, np.where(np.arange(count) < right, labels, 1 - labels))
    assert judge_reference(one, ("a", "b"), Expectations(), is_sample=is_sample).objections == ()


def siblings(classes: int, each: int, seed: int) -> Outcomes:
    """A sound network of 30 to 90 % right by class, that takes the rest mostly for the four most like it."""
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), each)
    top1 = np.empty_like(labels)
    for one in range(classes):
        right = generator.uniform(0.3, 0.9)
        family = np.delete(np.arange(one // 5 * 5, one // 5 * 5 + 5), one % 5)
        shares = np.full(classes, 0.2 * (1 - right) / classes)
        shares[one] += right
        shares[family] += 0.8 * (1 - right) * generator.dirichlet(np.ones(4))
        top1[labels == one] = generator.choice(classes, each, p=shares / shares.sum())
    return outcomes(labels, top1)


@pytest.mark.parametrize(("classes", "each"), [(100, 100), (100, 5), (20, 10), (10, 10)])
def test_classes_that_are_taken_for_their_siblings_are_no_other_order_of_the_labels(classes, each):
    names = tuple(map(str, range(classes)))
    for seed in range(20):
        one = siblings(classes, each, seed)
        assert judge_reference(one, names, Expectations()).objections == ()
        kept = np.sort(np.random.default_rng(seed).permutation(len(one.labels))[:512])
        few = outcomes(one.labels[kept], one.top1[kept])
        assert judge_reference(few, names, Expectations(), is_sample=True).objections == ()


@pytest.mark.parametrize("is_sample", [False, True])
@pytest.mark.parametrize(("classes", "count", "moved"), [(10, 400, 4), (10, 400, 10), (1000, 5000, 1000), (2, 40, 2)])
def test_labels_in_another_order_are_refused_and_named(classes, count, moved, is_sample):
    names = tuple(map(str, range(classes)))
    labels, top1 = good_network(0.85, classes=classes, count=count)
    order = np.arange(classes)
    order[:moved] = order[:moved][::-1].copy()
    one = outcomes(labels, order[top1])
    (objection,) = judge_reference(one, names, Expectations(), is_sample=is_sample).objections
    assert "the labels are " in objection
    assert f"images of '0' are answered as '{moved - 1}', '1' are answered as '{order[1]}'" in objection


def answered_in(order: np.ndarray, accuracy: float, seed: int) -> str:
    """What is said of a network of such accuracy whose labels are in this order; empty where nothing is."""
    labels, top1 = good_network(accuracy, classes=len(order), count=60 * len(order), seed=seed)
    found = judged(labels, order[top1], names_of(len(order)))
    return "; ".join(one for one in (*found.objections, *found.findings) if "answered as" in one)


def names_of(classes: int) -> tuple[str, ...]:
    return tuple(f"class {index}" for index in range(classes))


def moved_in(words: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in re.findall(r"'class (\d+)' are answered as 'class (\d+)'", words)]


@given(st.permutations(list(range(7))), st.sampled_from([0.75, 0.9, 1.0]), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_what_is_said_of_an_order_holds_for_it(order, accuracy, seed):
    classes = len(order)
    words = answered_in(np.array(order), accuracy, seed)
    moved = [index for index in range(classes) if order[index] != index]
    assert bool(words) == bool(moved)
    assert all(order[a] == b and a != b for a, b in moved_in(words))
    assert len(moved_in(words)) == min(len(moved), 4)
    distances = {(to - one) % classes for one, to in enumerate(order)}
    is_shift = len(distances) == 1 and distances != {0}
    assert ("shifted by" in words) == is_shift
    if is_shift:
        by = int(re.search(r"shifted by (-?\d+)", words)[1])
        assert {by % classes} == distances
    if "reverse order" in words:
        assert order == list(range(classes))[::-1]
    if "each other's place" in words:
        assert all(order[order[one]] == one for one in range(classes))
    circle = re.search(r"(\d) of them are in a circle: (.*?);", words)
    if circle:
        names = [int(one) for one in re.findall(r"'class (\d+)'", circle[2])]
        assert len(names) - 1 == int(circle[1]) == len(moved)
        assert all(order[a] == b for a, b in itertools.pairwise(names))
    if moved:
        right = re.search(r"([\d.]+) % would be right", words)
        assert right is None or float(right[1]) > 100 * accuracy - 10


@pytest.mark.parametrize("each", [4, 5, 40])
@pytest.mark.parametrize(
    ("order", "said"),
    [
        ([3, 0, 1, 2, 4], "4 of them are in a circle: 'class 0' as 'class 3' as 'class 2' as 'class 1' as 'class 0'"),
        ([1, 2, 0, 3, 4, 5], "3 of them are in a circle: 'class 0' as 'class 1' as 'class 2' as 'class 0'"),
        ([1, 2, 3, 4, 5, 7, 6, 0], ""),
        ([4, 3, 2, 1, 0], "they are in reverse order"),
        ([1, 0, 3, 2, 4], "swapped: 'class 0' and 'class 1', 'class 2' and 'class 3'"),
    ],
)
def test_a_circle_or_a_swap_is_no_shift_however_few_the_images_are(order, said, each):
    labels = np.repeat(np.arange(len(order)), each)
    found = judged(labels, np.array(order)[labels], names_of(len(order)))
    words = "; ".join((*found.objections, *found.findings))
    assert "shifted" not in words
    assert all(order[a] == b for a, b in moved_in(words))
    if each >= 5:
        assert said in words


@pytest.mark.parametrize("is_text", [True, False])
def test_names_sorted_as_text_where_they_were_numbers_are_told_and_the_other_way_round(is_text):
    by_number = [str(index) for index in range(12)]
    by_text = sorted(by_number)
    labels, outputs = (by_number, by_text) if is_text else (by_text, by_number)
    order = np.array([outputs.index(name) for name in labels])
    classes, top1 = good_network(0.9, classes=12, count=600)
    (words,) = judged(classes, order[top1], tuple(labels)).objections
    by = "of the alphabet" if is_text else "of the numbers in their names"
    assert f"the outputs are in the order {by}, and the labels are not" in words


def test_a_shift_is_seen_where_the_class_beyond_the_end_has_no_images():
    # Of a network with a background class in front.
    labels = np.repeat(np.arange(9), 30)
    (words,) = judged(labels, labels + 1).objections
    assert "the labels are shifted by 1: images of 'a' are answered as 'b', 'b' are answered as 'c'" in words
    assert "100.00 % would be right" in words


def test_two_of_many_classes_in_each_others_place_are_told_and_not_refused():
    labels, top1 = good_network(0.9, classes=100, count=5000)
    order = np.arange(100)
    order[:2] = 1, 0
    found = judged(labels, order[top1], tuple(map(str, range(100))))
    assert found.objections == ()
    assert "most images of '0' are answered as '1', '1' are answered as '0'; check that --labels" in found.findings[0]


def test_a_single_output_tells_two_classes_apart():
    labels, answers = np.array([0, 1, 1]), np.array([[-2.0], [0.4], [3.0]], np.float32)
    assert Outcomes.of(answers, answers, labels, "sigmoid").top1.tolist() == [0, 1, 1]
    assert Outcomes.of(np.abs(answers) / 4, answers, labels, "none").top1.tolist() == [0, 0, 1]


def test_images_that_leave_the_ranges_of_calibration_are_named():
    calibrated = {f"t{index}": (0.0, 1.0 + index) for index in range(8)}
    same = {name: (0.05, 0.95 * high) for name, (_, high) in calibrated.items()}
    assert drift_of(calibrated, same) == ""
    bright = {name: (0.0, 3 * high if name < "t4" else high) for name, (_, high) in calibrated.items()}
    told = drift_of(calibrated, bright)
    assert "4 of 8 tensors go beyond the range of calibration (worst t0: 0 to 3, calibrated for 0 to 1)" in told
    assert "calibrate on images like those that will be served" in told
    dim = {name: (0.0, high / 10) for name, (_, high) in calibrated.items()}
    assert "8 of 8 tensors use less than a quarter" in drift_of(calibrated, dim)
