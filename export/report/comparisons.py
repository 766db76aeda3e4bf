"""Pictures on which a variant loses most, with the answers of fp32 and of the variant side by side.

They are chosen here and drawn in the report. Boxes, masks, keypoints and class maps are those that a server would
answer. They are bounded in number and size, because they are in the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from xml.etree.ElementTree import Element

import numpy as np
from PIL import Image

from convoy.export.data import ImageSet
from convoy.export.progress import IGNORED
from convoy.export.proof.box_scores import window_of
from convoy.export.proof.judging import class_maps, of_size
from convoy.export.proof.outcomes import ScoredOutcomes
from convoy.export.report.pictures import in_base64, seen_picture
from convoy.export.targets import OBJECT, PICTURE, UNLABELLED
from convoy.export.variants.precision import REFERENCE, Recipe
from convoy.export.variants.variant import OpenVariant, opened
from convoy.models.boxes import InputBoxes, find_boxes, further_values, input_keypoints
from convoy.models.bundle import Comparison, DrawnAnswer, DrawnBox, Manifest
from convoy.models.errors import ModelFailed
from convoy.models.geometry import ImagePlacement
from convoy.models.masks import masks_on_picture
from convoy.models.page.markup import add, element
from convoy.models.run_lengths import mask_of
from convoy.models.spec import ImageSpec, ModelSpec
from convoy.models.tasks import DetectionOutputs

MOST_COMPARED = 6
# Of a picture; the best ones tell enough.
_MOST_BOXES = 20
# Below it, a keypoint is usually hidden or outside of the picture.
_LEAST_POINT_SCORE = 0.5
_PICTURE_PX, _MAP_PX, _JPEG_QUALITY = 360, 160, 78
# On the page, to which lines and letters are scaled.
_PANEL_PX = 300
# Of classes. Bright, because pictures are as often dark.
_PALETTE = np.array(
    [(240, 140, 60), (60, 200, 220), (240, 110, 170), (70, 200, 140), (225, 195, 60), (90, 150, 240), (190, 130, 220)],
    np.uint8,
)


class _Chosen(NamedTuple):
    """An image by its place in the set, and the variant that loses most on it, with both scores."""

    place: int
    file: str
    score: float
    other_score: float


def compare_pictures(
    outcomes: Mapping[str, ScoredOutcomes], recipes: Sequence[Recipe], images: ImageSet, spec: ModelSpec, folder: Path
) -> tuple[Comparison, ...]:
    """The comparisons of a detector or segmenter, largest loss first; `outcomes` are by file, with fp32's.

    Empty if an image does not decode, because the scores do not say whose they are.
    """
    if any(len(one.scores) != images.count for one in outcomes.values()):
        return ()
    chosen = _worst(outcomes)
    files = {REFERENCE.file, *(one.file for one in chosen)}
    with opened(spec, [recipe for recipe in recipes if recipe.file in files], folder) as candidates:
        variants = {one.recipe.file: one for one in candidates}
        return tuple(_compared(one, variants, images, spec) for one in chosen)


def _worst(outcomes: Mapping[str, ScoredOutcomes]) -> list[_Chosen]:
    """Largest loss first, then least agreement, then lowest score of fp32. Each image occurs once.

    No variant has more than its share of them: one that finds nothing would hide what the others lose.
    """
    reference = outcomes[REFERENCE.file]
    others = {file: one for file, one in outcomes.items() if file != REFERENCE.file} or dict(outcomes)
    ranked = sorted(
        (one.scores[place] - reference.scores[place], one.agreements[place], reference.scores[place], place, file)
        for file, one in others.items()
        for place in range(len(reference.scores))
    )
    most = max(2, MOST_COMPARED // len(others))
    worst: dict[int, _Chosen] = {}
    for _, _, score, place, file in ranked:
        if place not in worst and sum(one.file == file for one in worst.values()) < most:
            worst[place] = _Chosen(place, file, float(score), float(others[file].scores[place]))
        if len(worst) == MOST_COMPARED:
            break
    return list(worst.values())


def _compared(chosen: _Chosen, variants: Mapping[str, OpenVariant], images: ImageSet, spec: ModelSpec) -> Comparison:
    sample = images.samples[chosen.place]
    (chunk,) = replace(images, samples=(sample,)).chunks(IGNORED, 1)
    assert chunk.targets is not None, "only labelled images are compared; this is a bug"
    read = _boxes_of if spec.detection is not None else _map_of
    reference, other = (read(variants[file].answers(chunk.inputs), spec) for file in (REFERENCE.file, chosen.file))
    wanted, window = _wanted(chunk.targets[0], spec), _seen(chunk.targets[0], spec)
    picture = in_base64(
        seen_picture(sample.encoded(), images.image, _PICTURE_PX), "JPEG", quality=_JPEG_QUALITY, subsampling=0
    )
    names = Path(sample.name).name, chosen.file
    return Comparison(*names, chosen.score, chosen.other_score, picture, window, wanted, reference, other)


def _seen(target: np.ndarray, spec: ModelSpec) -> tuple[float, ...]:
    """The part of the input, in shares of it, that shows the image and not a padding."""
    if spec.detection is not None and target.shape[1] > 5:
        shown = target[target[:, 5] == PICTURE, :4]
        if len(shown):
            return _shares(shown[0].clip(0, np.inf), window_of(spec))
    return (0.0, 0.0, 1.0, 1.0)


def _shares(box: np.ndarray, window: tuple[int, int]) -> tuple[float, ...]:
    return tuple(round(float(one), 4) for one in np.clip(box / np.tile(window, 2), 0, 1))


def _wanted(target: np.ndarray, spec: ModelSpec) -> DrawnAnswer:
    if spec.detection is None:
        return DrawnAnswer(class_map=_drawn(np.where(target == UNLABELLED, -1, target.astype(np.int64)), spec))
    rows = target[(target[:, 4] >= 0) & (target[:, 5] == OBJECT)]
    return DrawnAnswer(
        tuple(DrawnBox(int(row[4]), 1.0, _shares(row[:4], window_of(spec))) for row in rows[:_MOST_BOXES])
    )


def _boxes_of(answers: Mapping[str, np.ndarray], spec: ModelSpec) -> DrawnAnswer:
    said, window = spec.detection, window_of(spec)
    assert said is not None, "only detectors have boxes; this is a bug"
    values = {name: answers[name][0] for name in said.names}
    try:
        found = find_boxes(values, said, spec.activation, window, said.threshold, said.max_boxes)
        best = InputBoxes._make(one[:_MOST_BOXES] for one in found)
        points = input_keypoints(values, said, best.rows, window).tolist() if said.keypoints else [[]] * len(best.rows)
        masks = "" if said.prototypes is None else _masks_of(values, said, best, window)
    except ModelFailed:
        return DrawnAnswer()
    boxes = [
        DrawnBox(int(label), round(float(score), 3), _shares(corners, window), _points(own, window))
        for label, score, corners, own in zip(best.classes, best.scores, best.corners, points, strict=True)
    ]
    return DrawnAnswer(tuple(boxes), len(found.rows) - len(boxes), masks)


def _points(of_object: list[list[float]], window: tuple[int, int]) -> tuple[tuple[float, ...], ...]:
    """Without those that the network does not see."""
    return tuple(
        (round(x / window[0], 4), round(y / window[1], 4))
        for x, y, *score in of_object
        if not score or score[0] >= _LEAST_POINT_SCORE
    )


def _masks_of(
    values: Mapping[str, np.ndarray], said: DetectionOutputs, found: InputBoxes, window: tuple[int, int]
) -> str:
    """The masks of these objects as a PNG of their classes' colours, the best on top. Raises ModelFailed."""
    assert said.prototypes is not None, "only detectors with prototypes have masks; this is a bug"
    scale = min(1, _MAP_PX / max(window))
    width, height = (max(1, round(side * scale)) for side in window)
    small = ImagePlacement((width, height), window, (0, 0), window)
    corners = small.boxes_on_picture(found.corners)
    masks = list(masks_on_picture(further_values(values, said, found.rows), values[said.prototypes], corners, small))
    classes = np.full((height, width), -1)
    for label, mask in reversed(list(zip(found.classes.tolist(), masks, strict=True))):
        classes[mask_of(mask, height, width)] = label
    return _png(classes, classes >= 0)


def _map_of(answers: Mapping[str, np.ndarray], spec: ModelSpec) -> DrawnAnswer:
    assert spec.segmentation is not None, "only segmenters have class maps; this is a bug"
    return DrawnAnswer(class_map=_drawn(class_maps(answers[spec.segmentation.class_map], spec.activation)[0], spec))


def _drawn(classes: np.ndarray, spec: ModelSpec) -> str:
    """A class map [h, w] as a base64 PNG, transparent where it is the background or -1."""
    most = max(classes.shape)
    if most > _MAP_PX:
        classes = of_size(classes[None], tuple(max(1, side * _MAP_PX // most) for side in classes.shape))[0]
    return _png(classes, classes > 0 if _has_background(spec.labels) else classes >= 0)


def _png(classes: np.ndarray, is_shown: np.ndarray) -> str:
    pixels = np.dstack([_PALETTE[classes % len(_PALETTE)], np.where(is_shown, 255, 0).astype(np.uint8)])
    return in_base64(Image.fromarray(pixels).quantize(len(_PALETTE) + 1), "PNG")


def _has_background(labels: Sequence[str]) -> bool:
    return not labels or labels[0] in ("background", "__background__")


def compared_pictures(manifest: Manifest) -> list[Element | None]:
    """Nothing without comparisons."""
    shown, spec = manifest.comparisons, manifest.spec
    if not shown or spec.image is None:
        return []
    about = f"{len(shown)} images of the evaluation, each with the variant that loses most on it; largest loss first."
    if spec.detection is not None:
        about += f" Boxes have scores of at least {spec.detection.threshold:g}; the labelled ones are dashed."
    rows = [_row(one, place, manifest) for place, one in enumerate(shown)]
    return [element("p", about, class_="note"), _legend(manifest), element("div", *rows, class_="compared")]


def _legend(manifest: Manifest) -> Element:
    labels = manifest.spec.labels
    answers = [answer for one in manifest.comparisons for answer in (one.wanted, one.reference, one.other)]
    numbers = sorted({box.class_id for answer in answers for box in answer.boxes})
    if manifest.spec.segmentation is not None:
        numbers = list(range(_has_background(labels), len(labels)))[:_MOST_BOXES]
    legend = element("div", class_="legend flush")
    for number in numbers:
        add(
            legend,
            element("span", element("i", class_="swatch", style=f"--colour: {_colour(number)}"), _name(number, labels)),
        )
    return legend


def _name(number: int, labels: Sequence[str]) -> str:
    return labels[number] if number < len(labels) else f"class {number}"


def _colour(number: int) -> str:
    """As hexadecimal digits; the same in light and dark, because pictures are."""
    return "#" + "".join(f"{int(one):02x}" for one in _PALETTE[number % len(_PALETTE)])


def _row(one: Comparison, place: int, manifest: Manifest) -> Element:
    answers = [(f"{REFERENCE.file}, {manifest.metric} {one.score:.3f}", one.reference)]
    if one.file != REFERENCE.file:
        answers.append((f"{one.file}, {manifest.metric} {one.other_score:.3f}", one.other))
    if one.wanted.class_map:
        answers.insert(0, ("labels", one.wanted))
    panels = [_panel(one, place, said, answer, manifest, is_first=not at) for at, (said, answer) in enumerate(answers)]
    return element("section", element("h3", one.name), element("div", *panels, class_="panels"))


def _panel(
    one: Comparison, place: int, said: str, answer: DrawnAnswer, manifest: Manifest, *, is_first: bool
) -> Element:
    image = manifest.spec.image
    assert image is not None, "only images are compared; this is a bug"
    size: dict[str, str | float] = {"width": image.width, "height": image.height, "preserveAspectRatio": "none"}
    x1, y1, x2, y2 = (share * side for share, side in zip(one.window, (image.width, image.height) * 2, strict=True))
    svg = element("svg", viewBox=f"{x1:.1f} {y1:.1f} {x2 - x1:.1f} {y2 - y1:.1f}", role="img", aria_label=said)
    # Larger than the page shows it: the style sheet scales it down, and keeps its proportions by these.
    scale = 2 * _PANEL_PX / max(x2 - x1, y2 - y1)
    svg.attrib.update(width=f"{scale * (x2 - x1):.0f}", height=f"{scale * (y2 - y1):.0f}")
    # The bytes of a picture are in the page once.
    source = f"data:image/jpeg;base64,{one.picture}"
    add(
        svg,
        element("image", href=source, id=f"picture{place}", **size)
        if is_first
        else element("use", href=f"#picture{place}"),
    )
    if answer.class_map:
        add(svg, element("image", href=f"data:image/png;base64,{answer.class_map}", class_="classes-over", **size))
    for box in one.wanted.boxes:
        add(svg, _rectangle(box, image, "wanted"))
    letter = 11 * max(x2 - x1, y2 - y1) / _PANEL_PX
    for box in reversed(answer.boxes):  # the best on top
        add(svg, _rectangle(box, image, "under"))
        add(svg, _rectangle(box, image, "found", _colour(box.class_id)))
        for x, y in box.points:
            cx, cy = x * image.width, y * image.height
            add(svg, element("circle", cx=cx, cy=cy, r=0.3 * letter, class_="point", fill=_colour(box.class_id)))
        add(svg, _label(box, manifest.spec, letter, (x1, y1, x2)))
    more = f", and {answer.more} more boxes" if answer.more else ""
    return element("figure", svg, element("figcaption", f"{said}{more}"))


def _rectangle(box: DrawnBox, image: ImageSpec, class_: str, colour: str = "") -> Element:
    x1, y1, x2, y2 = (share * side for share, side in zip(box.box, (image.width, image.height) * 2, strict=True))
    drawn = element("rect", x=x1, y=y1, width=x2 - x1, height=y2 - y1, class_=class_)
    if colour:
        drawn.set("stroke", colour)
    return drawn


def _label(box: DrawnBox, spec: ModelSpec, letter: float, edges: tuple[float, float, float]) -> Element:
    """Above the box, or inside where there is no room above; `edges` are the picture's left, top and right."""
    assert spec.image is not None, "only images are compared; this is a bug"
    left, top, right = edges
    x1, y, x2, _ = (
        share * side for share, side in zip(box.box, (spec.image.width, spec.image.height) * 2, strict=True)
    )
    y += -0.35 * letter if y - top > 1.4 * letter else 1.1 * letter
    said = f"{_name(box.class_id, spec.labels)} {box.score:.2f}"
    style = f"font-size: {letter:.2f}px; stroke-width: {0.28 * letter:.2f}px"
    is_at_end = x1 + 0.62 * letter * len(said) > right and x1 - left > right - x2
    x, class_ = (x2 - 0.2 * letter, "named end") if is_at_end else (x1 + 0.2 * letter, "named")
    return element("text", said, x=x, y=y, class_=class_, style=style)
