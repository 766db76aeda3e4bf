"""The routes that infer: found by one look at the path, before FastAPI sees the request, which serves the rest."""

from __future__ import annotations

from convoy.app.calls.options import ServeOptions
from convoy.app.core import Core
from convoy.app.http.body import UploadRoom
from convoy.app.http.hot_route import HotRoute
from convoy.app.http.infer import InferRoute
from convoy.app.http.predictions import PredictionsRoute
from convoy.app.pictures.decoder import Decoder


class HotRoutes:
    """All are asked with POST."""

    def __init__(self, core: Core, options: ServeOptions) -> None:
        self.decoder = Decoder(options.decode_threads, options.max_decoding)
        core.waiting_to_decode = lambda: self.decoder.waiting
        room = UploadRoom(core.slab)
        self._predictions = PredictionsRoute(core, options, self.decoder, room)
        self._infer = InferRoute(core, options, self.decoder, room)
        self.by_path: dict[str, HotRoute] = {
            path: route for route in (self._predictions, self._infer) for path in route.paths
        }

    def find(self, path: str) -> tuple[HotRoute, dict[str, str]] | None:
        """The route of a path, and the parameters in it. The route itself refuses a version that is empty."""
        match path.split("/"):
            case ["", "predictions", model] if model:
                return self._predictions, {"model": model}
            case ["", "predictions", model, version] if model:
                return self._predictions, {"model": model, "version": version}
            case ["", "v2", "models", model, "infer"] if model:
                return self._infer, {"model": model}
            case ["", "v2", "models", model, "versions", version, "infer"] if model:
                return self._infer, {"model": model, "version": version}
        return None

    def close(self) -> None:
        self.decoder.close()
