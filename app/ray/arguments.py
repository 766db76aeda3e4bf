"""The arguments of `serve run convoy.ray:build_app` and of `args` in a Serve config file.

There are two kinds of names: Ray's, which are the fields here, and every option of `convoy serve` that applies to a
replica, under its own name (`max_batch`, `api_key_file`). Other names are an error.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from convoy.app.config.settings import Settings, read_settings
from convoy.app.lifecycle.remote_files import is_url
from convoy.models.errors import UsageError

# Options that do not apply: Ray listens and ends the process, and one replica is one process.
_RAYS_OWN = frozenset(
    (
        *("host", "port", "grpc_port", "address_file", "edges", "drain_delay_s"),
        *("tls_cert_file", "tls_key_file", "tls_client_ca_file"),
    )
)
SERVER_OPTIONS = tuple(name for name in Settings.model_fields if name not in _RAYS_OWN)


class AppArguments(BaseModel):
    """The arguments of the application. Options of `convoy serve` are allowed beside these fields.

    Raises ValueError (pydantic's) for an unknown name, with the nearest known one.
    """

    model_config = ConfigDict(extra="allow")

    store: str | None = Field(None, description="Folder of models, on every node; default: the demo.")
    name: str = Field("Convoy", min_length=1, description="Name of the deployment.")
    num_replicas: int | None = Field(None, ge=1, description="Number of replicas without autoscaling; default: 1.")
    num_cpus: float = Field(1, ge=0, description="CPUs that Ray reserves for each replica; also its threads.")
    num_gpus: float = Field(0, ge=0, description="GPUs that Ray reserves for each replica.")
    resources: dict[str, float] = Field(
        default_factory=dict, description="Other resources that Ray reserves for each replica."
    )
    placement_bundles: list[dict[str, float]] = Field(
        default_factory=list, description="Bundles of a placement group for each replica; the first holds the replica."
    )
    placement_strategy: str = Field("PACK", description="PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.")
    max_replicas_per_node: int | None = Field(None, ge=1, le=100, description="Most replicas on one node.")
    min_replicas: int | None = Field(None, ge=0, description="Autoscaling: the fewest replicas.")
    max_replicas: int | None = Field(None, ge=1, description="Autoscaling: the most replicas; turns autoscaling on.")
    target_utilisation: float = Field(0.7, gt=0, lt=1, description="Autoscaling: target utilization of a replica.")
    upscale_delay_s: float = Field(10, ge=0, description="Autoscaling: seconds to wait before adding replicas.")
    downscale_delay_s: float = Field(300, ge=0, description="Autoscaling: seconds to wait before removing a replica.")
    metrics_interval_s: float = Field(10, gt=0, description="Autoscaling: seconds between load reports of replicas.")
    look_back_period_s: float = Field(30, gt=0, description="Autoscaling: seconds over which the load is averaged.")
    max_ongoing_requests: int = Field(
        1024, ge=1, description="Most concurrent requests per replica that pass through Ray."
    )
    health_check_period_s: float = Field(2, gt=0, description="Seconds between health checks of a replica.")
    health_check_timeout_s: float = Field(10, gt=0, description="Seconds after which a health check fails.")
    graceful_shutdown_timeout_s: float = Field(
        40, ge=0, description="Seconds that a replica has to finish accepted requests."
    )
    router: str = Field(
        "", description="Request router of handles: Ray's own by default, or expected-finish for mixed devices."
    )

    @field_validator("resources", "placement_bundles", mode="before")
    @classmethod
    def _read_json(cls, given: Any) -> Any:
        """Parse values given as text on the command line."""
        return json.loads(given) if isinstance(given, str) else given

    @field_validator("router")
    @classmethod
    def _is_known(cls, router: str) -> str:
        if router not in ("", "expected-finish"):
            raise ValueError(f"router must be expected-finish or unset (Ray's own); got {router!r}")
        return router

    @model_validator(mode="after")
    def _fits_together(self) -> AppArguments:
        self._check_names()
        if self.max_replicas is None and self.min_replicas is not None:
            raise ValueError("min_replicas needs max_replicas; together they turn autoscaling on")
        if self.max_replicas is not None and self.num_replicas is not None:
            raise ValueError("set num_replicas, or min_replicas and max_replicas for autoscaling, not both")
        if self.max_replicas is not None and (self.min_replicas or 0) > self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}")
        self._check_server_options()
        return self

    def server_options(self) -> dict[str, object]:
        """The given options of `convoy serve`, and the threads that match `num_cpus`."""
        given = dict(self.model_extra or {})
        if "threads" not in given and self.num_cpus:
            given["threads"] = max(1, round(self.num_cpus))
        if self.store is not None:
            given["store"] = self.store
        return given

    def _check_names(self) -> None:
        known = [*type(self).model_fields, *SERVER_OPTIONS]
        for name in self.model_extra or {}:
            if name in _RAYS_OWN:
                raise ValueError(f"Ray sets {name!r} in a replica; remove it")
            if name not in known:
                near = get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; the arguments are {', '.join(sorted(known))}"
                raise ValueError(f"unknown argument {name!r}{hint}")

    def _check_server_options(self) -> None:
        try:
            read_settings(self.server_options())
        except UsageError as error:
            raise ValueError(str(error)) from error


def replica_settings(given: dict[str, object]) -> Settings:
    """The settings of a replica: the given options, then its environment, then the defaults. Raises UsageError."""
    store = given.get("store")
    if isinstance(store, str) and not (is_url(store) or Path(store).expanduser().exists()):
        raise UsageError(f"store {store} is not on the node of this replica; it must be reachable from every node")
    # Requests come through Ray's proxy, so the replica's own address does not matter.
    return read_settings({**given, "host": "0.0.0.0", "port": 0, "grpc_port": -1})
