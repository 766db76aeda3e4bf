"""What fp32 answers wrongly: confused classes, and the most confident mistakes; found here, and drawn in the report.

The mistakes are bounded in number and size, because they are in the manifest. With many classes the report lists pairs,
because a matrix would be too wide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from xml.etree.ElementTree import Element

import numpy as np

from convoy.export.data import ImageSet
from convoy.export.proof.outcomes import Outcomes
from convoy.export.report.pictures import in_base64, seen_picture
from convoy.models.bundle import Accuracy, Confusion, Manifest, Mistake, Mistakes
from convoy.models.page.markup import add, element, table
from convoy.models.spec import ImageSpec

MOST_IN_MATRIX = 20
# In pixels, on a page that is wide enough; smaller pages scale everything.
_CELL, _GAP, _LETTER = 27.0, 1.0, 6.4
_MOST_LETTERS = 16
_PICTURE_PX = 72


MOST_PICTURES = 12


def find_mistakes(outcomes: Outcomes, images: ImageSet) -> Mistakes:
    """The mistakes among the answers to `images`. Raises ImageError if one of them does not exist any more."""
    wrong = np.flatnonzero(~outcomes.right)
    labels = images.labels
    pairs = Counter(zip(outcomes.labels[wrong].tolist(), outcomes.top1[wrong].tolist(), strict=True))
    # Most frequent first, ties in the order of the labels, so that the result is reproducible.
    ranked = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))
    surest = wrong[np.argsort(-outcomes.scores[wrong], kind="stable")][:MOST_PICTURES]
    return Mistakes(
        images=len(wrong),
        pairs=len(pairs),
        confusions=tuple(
            # All pairs of 20 classes.
            Confusion(labels[label], labels[answered], count)
            for (label, answered), count in ranked[:380]
        ),
        most_confident=tuple(
            Mistake(
                label=labels[outcomes.labels[index]],
                answered=labels[outcomes.top1[index]],
                score=float(np.nan_to_num(outcomes.scores[index])),
                picture=picture_of(images.samples[outcomes.positions[index]].encoded(), images.image),
            )
            for index in surest
        ),
    )


def picture_of(encoded: bytes, image: ImageSpec) -> str:
    """The part of an image that the network sees, at most 64 pixels high and wide, as a base64 PNG.

    Raises ImageError.
    """
    # At most 12 KB of pixels, which PNG reduces or hardly enlarges.
    return in_base64(seen_picture(encoded, image, 64), "PNG")


def wrong_answers(manifest: Manifest) -> list[Element | None]:
    """Nothing without labelled images."""
    accuracy, mistakes = manifest.variants[0].accuracy, manifest.mistakes
    if accuracy is None or mistakes is None:
        return []
    if not mistakes.images:
        return [element("p", f"None: fp32 is right on all of the {accuracy.images:,} images.")]
    about = (
        f"fp32 is wrong on {mistakes.images:,} of {accuracy.images:,} labelled images, in {mistakes.pairs:,} pairs of "
        "class and answer. What the other files change is told with their accuracy."
    )
    matrix, pairs, surest = _matrix(accuracy, mistakes), _pairs(mistakes), _surest(mistakes.most_confident)
    # Two charts stand side by side if there is room.
    beside, below = (surest, None) if matrix is None else (matrix, surest)
    return [element("p", about, class_="note"), element("div", beside, pairs, class_="charts"), below]


def _pairs(mistakes: Mistakes) -> Element:
    rows = [[one.label, one.answered, f"{one.images:,}"] for one in mistakes.confusions[:15]]
    more = mistakes.pairs - len(rows)
    rest = element("p", f"and {more:,} more pairs", class_="note") if more else None
    listed = table(("class", "answered as", "images"), rows, class_="pairs")
    return element("div", element("h3", "Most confused"), listed, rest)


def _matrix(accuracy: Accuracy, mistakes: Mistakes) -> Element | None:
    """A row per class with images, a column per class that has some or is answered; None if it is too large."""
    counts = {(one.label, one.answered): one.images for one in mistakes.confusions}
    images = {one.label: one.images for one in accuracy.per_class}
    for one in accuracy.per_class:
        counts[one.label, one.label] = round(one.recall * one.images)
    rows = list(images)
    columns = [*rows, *sorted({answered for _, answered in counts} - images.keys())]
    if len(columns) > MOST_IN_MATRIX or len(mistakes.confusions) < mistakes.pairs or len(rows) < 2:
        return None
    left = 26 + _LETTER * min(_MOST_LETTERS, max(map(len, rows)))
    top = 36 + _LETTER * min(_MOST_LETTERS, max(map(len, columns)))
    width, height = left + _CELL * len(columns), top + _CELL * len(rows)
    said = "; ".join(f"{label} as {answered}: {count}" for (label, answered), count in counts.items() if count)
    name = "Confusion matrix"
    svg = element("svg", viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=f"{name}. Images of each: {said}")
    # Not wider than drawn: a matrix of three classes does not fill half a page.
    svg.set("style", f"max-width: {1.25 * width:.0f}px")
    middle = left + _CELL * len(columns) / 2
    add(svg, element("text", "answered", x=middle, y=12, class_="label middle"))
    at = top + _CELL * len(rows) / 2
    add(svg, element("text", "class", x=11, y=at, transform=f"rotate(-90 11 {at:g})", class_="label middle"))
    for column, answered in enumerate(columns):
        x = left + _CELL * (column + 0.5) + 3.5
        turned = f"rotate(-90 {x:g} {top - 6:g})"
        add(svg, element("text", _short(answered), x=x, y=top - 6, transform=turned, class_="tick"))
    for row, label in enumerate(rows):
        y = top + _CELL * row
        add(svg, element("text", _short(label), x=left - 6, y=y + _CELL / 2 + 4, class_="tick end"))
        for column, answered in enumerate(columns):
            count = counts.get((label, answered), 0)
            cell = _cell(label, answered, count, images[label])
            cell.set("transform", f"translate({left + _CELL * column:.2f} {y:.2f})")
            add(svg, cell)
    return element("figure", element("figcaption", name), svg, class_="matrix")


def _cell(label: str, answered: str, count: int, images: int) -> Element:
    """Its colour shows the share of the class's images; a single mistake is visible, too."""
    is_right = label == answered
    share = count / images
    size = _CELL - _GAP
    square = {"width": size, "height": size, "rx": 2}
    made = element("g", element("title", f"{count:,} of {images:,} images of {label} are answered as {answered}"))
    add(made, element("rect", class_="empty", **square))
    if count:
        opacity = f"{max(0.18, share):.2f}"
        add(made, element("rect", class_=f"bar {'k0' if is_right else 'bad'}", fill_opacity=opacity, **square))
        class_ = "count middle strong" if share > 0.55 else "count middle"
        # In at most four characters.
        brief = str(count) if count < 10_000 else f"{count / 1000:.0f}k"
        add(made, element("text", brief, x=size / 2, y=size / 2 + 3.5, class_=class_))
    return made


def _short(label: str) -> str:
    return label if len(label) <= _MOST_LETTERS else f"{label[: _MOST_LETTERS - 1]}…"


def _surest(mistakes: Sequence[Mistake]) -> Element:
    gallery = element("div", class_="gallery")
    for one in mistakes:
        picture = element(
            "img",
            src=f"data:image/png;base64,{one.picture}",
            alt=f"an image of {one.label}",
            width=_PICTURE_PX,
            height=_PICTURE_PX,
        )
        words = element("figcaption", element("b", one.label), element("br"), f"answered as {one.answered}")
        add(words, element("br"))
        add(words, f"with {100 * one.score:.1f} %")
        add(gallery, element("figure", picture, words))
    about = "The wrong answers with the highest scores, and what the network sees. Some may be labelled wrongly."
    return element("div", element("h3", "Most confident mistakes"), element("p", about, class_="note"), gallery)
