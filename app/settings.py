"""What the operator can set, in one place: names, defaults, help and limits.

The command line and `uvicorn convoy.app.main:app` read the same model. Priority: command line, environment
(`CONVOY_*`), default. Read once, at the rim; the rooms inside take plain arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from convoy.app.core import CoreOptions
from convoy.app.edge.http.connection import ConnectionLimits
from convoy.app.edge.http.own_pages import host_name, is_loopback
from convoy.app.edge.options import BodyLimits, EdgeOptions
from convoy.app.edge_count import MOST_EDGES, EdgeCount, choose_edges, has_gpu_driver
from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.machine import CPU_ONLY, Machine, find_cpu, find_machine
from convoy.app.engines.select import PrecisionChoice
from convoy.app.engines.table import AUTO, CHOICES, REFERENCE, may_use_gpus
from convoy.app.lifecycle.control import EVERYTHING, ControlMode, ControlOptions
from convoy.app.loading.load import DEFAULT_LIMIT_S, LoadOptions
from convoy.app.submission.listing import Policy
from convoy.models.errors import UsageError
from convoy.models.images import DEFAULT_MAX_PIXELS
from convoy.models.plan_cache import plan_folder
from convoy.models.store import DEMO_STORE, check_name

MIB = 1 << 20


class Settings(BaseSettings):
    """Every option of `convoy serve`; each has a twin in the environment."""

    model_config = SettingsConfigDict(env_prefix="CONVOY_", extra="ignore")

    store: Path | None = Field(None, description="Folder of bundles and bare models. Without it the demo is served.")
    host: str = Field("0.0.0.0", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 takes a free one.")
    address_file: str = Field("", description="File to write the HTTP URL to, once the server listens.")
    grpc_port: int = Field(8001, ge=-1, le=65535, description="gRPC port; 0 takes a free one, -1 leaves gRPC out.")
    engine: str = Field(AUTO, description="Which engine may serve, such as rtx or cpu: that one, or a clear failure.")
    precision: PrecisionChoice = Field("auto", description="Which variant of a bundle serves.")
    plan_cache: Path | None = Field(
        None, description="Folder of TensorRT plans and tunings; by default convoy/ in the user's cache folder."
    )
    threads: int = Field(0, ge=0, description="Threads that compute, over all models; 0 takes the CPU budget.")
    max_batch: int = Field(0, ge=0, description="Largest batch, if below the model's own; 0 leaves it.")
    edges: str = Field("auto", description="Processes that speak to clients; 0: one process does all, auto: by cores.")
    version_policy: str = Field("latest", description="latest, all, or numbers such as 1,3.")
    model_control: ControlMode = Field("none", description="none, explicit (over the network), or poll (the store).")
    load_model: str = Field("", description="With explicit: names to load at the start, such as a,b, or *.")
    load_timeout_s: float = Field(DEFAULT_LIMIT_S, gt=0, description="A version that takes longer to load is refused.")
    poll_interval_s: float = Field(2, gt=0, description="With poll: look at the store so often.")
    max_queue: int = Field(1024, ge=1, description="Samples that may wait per model.")
    max_inflight_mb: int = Field(1024, ge=1, description="Memory for requests in flight and for decoding, MiB.")
    max_body_mb: int = Field(64, ge=1, description="Largest request body, MiB.")
    max_pixels: int = Field(DEFAULT_MAX_PIXELS, ge=1, description="Images with more pixels are refused undecoded.")
    default_timeout_ms: float = Field(0, ge=0, description="Deadline of requests that name none; 0: none.")
    drain_delay_s: float = Field(0, ge=0, description="After SIGTERM, keep serving so long while not ready.")
    drain_timeout_s: float = Field(30, ge=0, description="After that, so long to finish what was accepted.")
    max_connections: int = Field(4096, ge=1, description="Open connections; more are answered 503.")
    header_timeout_s: float = Field(10, gt=0, description="So long may a client take to send its headers.")
    body_timeout_s: float = Field(10, gt=0, description="So long, and 1 s per 256 KiB, to send its body.")
    write_timeout_s: float = Field(30, gt=0, description="So long may a client refuse to read its answer.")
    allow_shared_memory: bool = Field(False, description="Let clients register system shared memory.")
    server_name: str = Field("convoy", description="The name in /v2; some clients insist on 'triton'.")
    api_key_file: Path | None = Field(None, description="File with the API key that clients must send.")
    admin_token_file: Path | None = Field(None, description="File with the token that loading models wants.")
    allowed_host: str = Field("", description="Names, such as a,b, of pages that may load models without a token.")
    # A line for each request costs a fifth of a small one; the statistics tell of those that went well.
    access_log: Literal["all", "errors", "off"] = Field("errors", description="errors: errors and slow requests.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Log level.")

    @field_validator("engine")
    @classmethod
    def _is_in_the_table(cls, engine: str) -> str:
        if engine not in CHOICES:
            raise ValueError(f"choose from {', '.join(CHOICES)}")
        return engine

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        if self.max_inflight_mb < self.max_body_mb:
            raise ValueError("max_inflight_mb must be at least max_body_mb, or no body of that size could be read")
        self.versions()
        self._check_edges()
        if self.load_model and self.model_control != "explicit":
            raise ValueError("load_model needs model_control explicit; otherwise everything in the store is loaded")
        self._check_load_model()
        self._allowed_hosts()
        return self

    def _allowed_hosts(self) -> tuple[str, ...]:
        """Without their ports. Raises ValueError."""
        hosts = {given: host_name(given) for given in _names(self.allowed_host)}
        if wrong := [given for given, name in hosts.items() if not name]:
            raise ValueError(f"allowed_host must be names such as a.example,b.example; got {wrong[0]!r}")
        return tuple(hosts.values())

    def _check_load_model(self) -> None:
        try:
            for name in set(_names(self.load_model)) - {EVERYTHING}:
                check_name(name)
        except UsageError as error:
            raise ValueError(f"load_model: {error}") from error

    def _check_edges(self) -> None:
        if self.edges == "auto":
            return
        if not (self.edges.isascii() and self.edges.isdigit() and int(self.edges) <= MOST_EDGES):
            raise ValueError(f"edges must be auto or a number from 0 to {MOST_EDGES}, got {self.edges!r}")
        parts = int(self.edges) + 1
        if parts > 1 and self.max_inflight_mb // parts < self.max_body_mb:
            raise ValueError(
                f"each of {self.edges} edges, and the core, has its part of max_inflight_mb, which must hold a body of "
                f"max_body_mb; set max_inflight_mb to at least {parts * self.max_body_mb}, or lower max_body_mb"
            )

    def edge_count(self) -> EdgeCount:
        """How many edge processes there are to be, and why."""
        if self.edges != "auto":
            return EdgeCount(int(self.edges), "as --edges says")
        room = self.max_inflight_mb // self.max_body_mb - 1
        return choose_edges(cpu_budget(), has_gpu=self._may_use_a_gpu(), room=room)

    def _may_use_a_gpu(self) -> bool:
        return may_use_gpus(self.engine) and has_gpu_driver()

    def versions(self) -> Policy:
        """The version policy, parsed. Raises ValueError."""
        if self.version_policy == "latest":
            return "latest"
        if self.version_policy == "all":
            return "all"
        numbers = self.version_policy.split(",")
        if not all(number.strip().isdigit() for number in numbers):
            raise ValueError(f"version_policy must be latest, all, or numbers such as 1,3; got {self.version_policy!r}")
        return tuple(int(number) for number in numbers)

    def plan_folder(self) -> Path:
        """Where plans and tunings are kept. Raises UsageError."""
        return plan_folder(self.plan_cache)

    def core_options(self) -> CoreOptions:
        threads = self.threads or cpu_budget()
        return CoreOptions(
            store=self.store or DEMO_STORE,
            load=LoadOptions(
                self.precision,
                threads,
                self.max_batch or None,
                engine=self.engine,
                machine=self._machine(),
                plan_cache=self.plan_folder(),
                limit_s=self.load_timeout_s,
            ),
            control=ControlOptions(self.model_control, self.versions(), self.poll_interval_s, _names(self.load_model)),
            max_queue=self.max_queue,
            max_inflight_bytes=self.max_inflight_mb * MIB,
            allow_shared_memory=self.allow_shared_memory,
        )

    def _machine(self) -> Machine:
        """What may serve here; what is not in question is not even asked."""
        if self.engine == REFERENCE.runner:
            return CPU_ONLY
        return find_machine() if may_use_gpus(self.engine) else find_cpu()

    def edge_options(self) -> EdgeOptions:
        return EdgeOptions(
            body=BodyLimits(self.max_body_mb * MIB, self.body_timeout_s),
            decode_threads=cpu_budget(),
            max_decoding=self.max_queue,
            engines_on_cpu=not self._may_use_a_gpu(),
            max_pixels=self.max_pixels,
            default_timeout_ms=self.default_timeout_ms,
            server_name=self.server_name,
            api_key=_secret("--api-key-file", self.api_key_file),
            admin_token=_secret("--admin-token-file", self.admin_token_file),
            is_loopback=is_loopback(self.host),
            allowed_hosts=self._allowed_hosts(),
            access_log=self.access_log,
        )

    def connection_limits(self) -> ConnectionLimits:
        return ConnectionLimits(
            header_timeout_s=self.header_timeout_s,
            write_timeout_s=self.write_timeout_s,
            linger_s=self.body_timeout_s,
            max_connections=self.max_connections,
        )


def read_settings(given: dict[str, object]) -> Settings:
    """Settings from what was given, then the environment, then the defaults. Raises UsageError."""
    try:
        return Settings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        raise not_valid(error, lambda name: "--" + name.replace("_", "-")) from error


def not_valid(error: ValidationError, option: Callable[[str], str] = str) -> UsageError:
    """The first thing that is wrong with what was given, under the name that its giver knows."""
    first = error.errors()[0]
    name = option(str(first["loc"][0])) if first["loc"] else "options"
    return UsageError(f"{name}: {first['msg'].removeprefix('Value error, ')}")


def _secret(option: str, path: Path | None) -> str | None:
    """What a file with a secret holds; None without a file. Raises UsageError."""
    if path is None:
        return None
    try:
        secret = path.read_text().strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"{option} {path} cannot be read: {error}") from error
    if not secret:
        raise UsageError(f"{option} {path} is empty; put the secret on its first line")
    return secret


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
