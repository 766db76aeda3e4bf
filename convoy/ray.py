"""Convoy in a Ray cluster: `serve run convoy.ray:build_app store=DIR`.

    import convoy.ray
    from ray import serve

    app = convoy.ray.build_app(convoy.ray.AppArguments(store="/models", num_replicas=2))
    handle = serve.run(app)

docs/ray.md says what Ray's nodes should have in their environment.
"""

# Without `from __future__ import annotations`: Ray inspects the very class that `build_app` names.
from ray.serve import Application

from convoy.app.ray.arguments import AppArguments
from convoy.app.ray.replica import application

__all__ = ["AppArguments", "build_app"]


def build_app(arguments: AppArguments) -> Application:
    """The application for `serve run`, `serve deploy` and `serve.run`."""
    return application(arguments)
