"""`--detection FILE.json`: how a detector's outputs become boxes, in the words of a bundle's spec.

Knows the file's form alone; whether it fits the outputs is asked where these are known.
"""

from __future__ import annotations

import json
from pathlib import Path

from convoy.models.errors import BundleError, UsageError
from convoy.models.records import from_jsonable
from convoy.models.tasks import DetectionOutputs

_FORM = 'write it as in {"boxes": "boxes", "scores": "scores", "box_form": "cxcywh", "iou_threshold": 0.5}'


def read_detection_file(path: Path) -> DetectionOutputs:
    """Fields that are left out are as `DetectionOutputs` has them. Raises UsageError."""
    try:
        return from_jsonable(DetectionOutputs, json.loads(path.read_text(encoding="utf-8")), "detection")
    except OSError as error:
        raise UsageError(f"--detection {path}: {error.strerror}; {_FORM}") from error
    except (ValueError, BundleError) as error:
        raise UsageError(f"--detection {path}: {error}; {_FORM}") from error
