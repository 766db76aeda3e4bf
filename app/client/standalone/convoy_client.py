"""A client for Convoy servers, over HTTP and gRPC: `Client` and `AsyncClient`, their results and their errors."""

from convoy.app.client.client import AsyncClient, Client
from convoy.app.client.records import RemoteModel
from convoy.models.answers import (
    Box,
    Classification,
    ClassShare,
    Detection,
    Detections,
    Prediction,
    Segmentation,
)
from convoy.models.errors import ConvoyError, RequestError

__all__ = [
    "AsyncClient",
    "Box",
    "ClassShare",
    "Classification",
    "Client",
    "ConvoyError",
    "Detection",
    "Detections",
    "Prediction",
    "RemoteModel",
    "RequestError",
    "Segmentation",
]
