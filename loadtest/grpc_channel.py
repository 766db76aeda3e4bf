"""Opens gRPC channels to the target. Imports the library only when it is called, because HTTP does not need it."""

from __future__ import annotations

from typing import Any

from convoy.loadtest.endpoint import Endpoint

ChannelOptions = list[tuple[str, int | str]]


def channel_options(endpoint: Endpoint) -> ChannelOptions:
    """Options for no proxy and messages of any size."""
    return [
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.default_authority", endpoint.host_header),
    ]


def open_channel(library: Any, endpoint: Endpoint, options: ChannelOptions) -> Any:
    """A channel of `library`, which is `grpc` or `grpc.aio`."""
    address = f"[{endpoint.address}]" if ":" in endpoint.address else endpoint.address
    target = f"{address}:{endpoint.port}"
    if not endpoint.tls:
        return library.insecure_channel(target, options=options)
    import grpc

    named = [*options, ("grpc.ssl_target_name_override", endpoint.host)]
    credentials = grpc.ssl_channel_credentials(*(endpoint.trust.texts() if endpoint.trust is not None else ()))
    return library.secure_channel(target, credentials, options=named)
