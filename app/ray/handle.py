"""The methods of a deployment handle: `handle.predict.remote(images)`, `handle.infer.remote(arrays)`.

They are those of `convoy.Engine`, on the replica's core; Ray passes values as Python objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from convoy.app.core import Core
from convoy.app.python.inputs import request_of
from convoy.app.python.inside import Asked, Asking, Question
from convoy.app.python.values import OneImage, one_or_several
from convoy.app.ray.connections import Ways
from convoy.models.answers import Classification, Detections, MaskForm, Segmentation
from convoy.models.errors import InvalidRequest


class HandleCalls:
    """The methods of a deployment; a base class, because Ray looks for methods on the object that it makes."""

    _core: Core
    _asking: Asking
    _ways: Ways

    async def predict(
        self,
        images: OneImage | Iterable[OneImage],
        *,
        model: str | None = None,
        version: int | str | None = None,
        top_k: int | None = None,
        threshold: float | None = None,
        timeout_ms: float | None = None,
    ) -> Classification | list[Classification]:
        """Like `convoy.Engine.predict`: one image gives a Classification, several give a list in their order.

        `model` may be left out if one is loaded. Paths are on the replica's node. Raises what the engine raises.
        """
        asked, question = self._asked(model, version, timeout_ms), Question(Classification, top_k, threshold)
        return await self._asking.ask(asked, one_or_several(images), question)

    async def segment(
        self,
        images: OneImage | Iterable[OneImage],
        *,
        model: str | None = None,
        version: int | str | None = None,
        timeout_ms: float | None = None,
    ) -> Segmentation | list[Segmentation]:
        """Like `convoy.Engine.segment`."""
        return await self._asking.ask(
            self._asked(model, version, timeout_ms), one_or_several(images), Question(Segmentation)
        )

    async def detect(
        self,
        images: OneImage | Iterable[OneImage],
        *,
        model: str | None = None,
        version: int | str | None = None,
        top_k: int | None = None,
        threshold: float | None = None,
        iou: float | None = None,
        masks: MaskForm | None = None,
        timeout_ms: float | None = None,
    ) -> Detections | list[Detections]:
        """Like `convoy.Engine.detect`."""
        question = Question(Detections, top_k, threshold, iou, masks)
        return await self._asking.ask(self._asked(model, version, timeout_ms), one_or_several(images), question)

    async def infer(
        self,
        inputs: Mapping[str, np.ndarray],
        *,
        model: str | None = None,
        version: int | str | None = None,
        outputs: Sequence[str] | None = None,
        timeout_ms: float | None = None,
        priority: int = 0,
    ) -> dict[str, np.ndarray]:
        """Like `convoy.Engine.infer`: arrays in and out, by the tensors' names. Raises what the engine raises."""
        asked = self._asked(model, version, timeout_ms)
        return await self._asking.infer(asked, request_of(inputs, outputs, priority, None))

    def _asked(self, model: str | None, version: int | str | None, timeout_ms: float | None) -> Asked:
        """Count the call and find its model. Raises InvalidRequest."""
        self._ways.by_handle += 1
        asked = Asked.of(model or "", version, timeout_ms)
        return asked if model else asked._replace(model=self._only_model())

    def _only_model(self) -> str:
        names = sorted({served.key.model for served in self._core.catalog.served()})
        if len(names) != 1:
            raise InvalidRequest(f"pass model=NAME; available: {', '.join(names) or 'none'}")
        return names[0]
