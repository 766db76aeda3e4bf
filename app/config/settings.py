"""All options of the operator: names, defaults, help and limits.

The command line, the environment (`CONVOY_*`), the file of `--config`, its JSON schema and `convoy config show` use the
same model; `app/config/sources.py` knows which source takes precedence. Settings are read at the start and on SIGHUP;
the other packages take plain arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from convoy.app.calls.access import ADMIN, ApiKey, BodyLimits, ServeOptions
from convoy.app.config.sources import Sources
from convoy.app.core import CoreOptions
from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.machine import CPU_ONLY, Machine, find_cpu, find_machine
from convoy.app.engines.select import PrecisionChoice
from convoy.app.engines.table import AUTO, CHOICES, REFERENCE, may_use_gpus
from convoy.app.http.browsers import host_name, is_loopback
from convoy.app.lifecycle.model_control import EVERYTHING, ControlMode, ControlOptions
from convoy.app.lifecycle.model_lifecycle import QueueOptions, QueueRules
from convoy.app.lifecycle.remote_files import is_url
from convoy.app.lifecycle.remote_store import RemoteStore
from convoy.app.loading.load import DEFAULT_LIMIT_S, LoadOptions
from convoy.app.loading.signed import SignedOnly
from convoy.app.server.acceptor import ConnectionLimits
from convoy.app.server.logs import LogFormat
from convoy.models.errors import UsageError
from convoy.models.images import DEFAULT_MAX_PIXELS
from convoy.models.plan_cache import plan_folder
from convoy.models.store import DEMO_STORE, check_name
from convoy.models.tls import ServerTls
from convoy.models.version_policy import Latest, Policy

# Marks an option that SIGHUP can change, in the schema as well.
LIVE: JsonDict = {"changes_on_sighup": True}
# The name of the --api-key-file key in the log.
DEFAULT_KEY = "default"
_KEY_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_ORIGIN = re.compile(r"https?://[\w.:\[\]-]+", re.ASCII)


def _as_text(given: object) -> object:
    """YAML reads `2` as a number."""
    return str(given) if isinstance(given, int | Path) and not isinstance(given, bool) else given


def _as_names(given: object) -> object:
    """A file may have a list for `a,b`."""
    return ",".join(map(str, given)) if isinstance(given, list | tuple) else _as_text(given)


Text = Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | int)]
Names = Annotated[str, BeforeValidator(_as_names, json_schema_input_type=str | int | list[str | int])]


# The headings of `convoy serve --help` and the options below them.
OPTION_GROUPS: dict[str, tuple[str, ...]] = {
    "Basics": ("config", "store", "host", "port", "grpc_port", "engine"),
    "Models": (
        "store_cache",
        "model_name",
        "precision",
        "plan_cache",
        "max_batch",
        "version_policy",
        "model_control",
        "load_model",
        "load_timeout_s",
        "poll_interval_s",
    ),
    "Limits": (
        "max_queue",
        "max_inflight_mb",
        "max_body_mb",
        "max_pixels",
        "default_timeout_ms",
        "drain_delay_s",
        "drain_timeout_s",
        "max_connections",
        "header_timeout_s",
        "body_timeout_s",
        "write_timeout_s",
    ),
    "Security": (
        "allow_shared_memory",
        "api_key_file",
        "admin_token_file",
        "require_signature",
        "tls_cert_file",
        "tls_key_file",
        "tls_client_ca_file",
        "allowed_host",
        "cors_origins",
    ),
    "Logging": ("access_log", "log_level", "log_format", "tracing"),
    "Advanced": ("address_file", "threads", "edges", "server_name"),
}


class OptionHeld(NamedTuple):
    """An effective option. `keys` lead to it in the file."""

    keys: tuple[str, ...]
    value: Any
    changes_on_sighup: bool

    @property
    def name(self) -> str:
        return ".".join(self.keys)


# In the file under `models`, by the model's name. An option that is left out is the server's or the model's own.
class ModelSettings(BaseModel):
    """The options of one model, for all of its versions."""

    model_config = ConfigDict(extra="forbid")

    max_batch: int | None = Field(None, ge=1, description="Largest batch, if smaller than the model's own.")
    max_queue: int | None = Field(
        None, ge=1, description="Maximum samples waiting; further requests get a 429.", json_schema_extra=LIVE
    )
    default_timeout_ms: float | None = Field(
        None, ge=0, description="Deadline of requests without one, in milliseconds; 0: none.", json_schema_extra=LIVE
    )
    priority_levels: int | None = Field(
        None, ge=1, description="Number of priority levels; 1 is the most urgent.", json_schema_extra=LIVE
    )
    default_priority: int | None = Field(
        None, ge=1, description="Priority level of requests without one.", json_schema_extra=LIVE
    )
    instances: int | None = Field(None, ge=1, description="CPU engines that compute at the same time; default: 1.")
    threads: int | None = Field(
        None,
        ge=1,
        description="Threads of each CPU engine; default: the server's, divided by instances.",
    )
    precision: PrecisionChoice | None = Field(None, description="Variant to serve.")
    warm_up_runs: int | None = Field(None, ge=1, description="Warm-up runs of each batch size; default: 1.")

    @model_validator(mode="after")
    def _fits_together(self) -> ModelSettings:
        levels, default = self.priority_levels, self.default_priority
        if levels is not None and default is not None and default > levels:
            raise ValueError(f"default_priority must be from 1 to priority_levels, {levels}; got {default}")
        return self

    def load_options(self, load: LoadOptions) -> LoadOptions:
        """The server's options, overridden by those of this model."""
        return replace(
            load,
            precision=self.precision or load.precision,
            threads=self.threads or max(1, load.threads // (self.instances or 1)),
            instances=self.instances or load.instances,
            max_batch=self.max_batch or load.max_batch,
            warm_up_runs=self.warm_up_runs or load.warm_up_runs,
        )


class Settings(BaseModel):
    """Every option of `convoy serve`; each has an environment variable.

    Options by name, such as keys and models, are not on the command line. Construction reads nothing: `read_settings`
    does.
    """

    model_config = ConfigDict(extra="forbid")
    _sources: Sources = PrivateAttr(default_factory=Sources)

    config: Path | None = Field(None, description="YAML file with these options; see docs/configuration.md.")
    store: Annotated[str, BeforeValidator(_as_text)] | None = Field(
        None, description="Folder or URL (s3://) of models; default: the demo."
    )
    store_cache: Path | None = Field(
        None, description="Folder for models downloaded from a store's URL; default: next to the plan cache."
    )
    model_name: Text = Field("", description="Name of the model, if the store is one model and not a folder of models.")
    host: str = Field("0.0.0.0", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 picks a free one.")
    address_file: str = Field("", description="File to write the HTTP URL to once the server listens.")
    grpc_port: int = Field(8001, ge=-1, le=65535, description="gRPC port; 0 picks a free one, -1 turns gRPC off.")
    engine: str = Field(
        AUTO,
        description="Engine to use; auto picks the best available, any other must be able to run.",
        json_schema_extra={"enum": [*CHOICES]},
    )
    precision: PrecisionChoice = Field("auto", description="Variant of each model to serve.")
    plan_cache: Path | None = Field(
        None, description="Folder for TensorRT plans and tuning results; default: convoy/ in the user's cache folder."
    )
    threads: int = Field(0, ge=0, description="Compute threads for all models; 0: one per available CPU.")
    max_batch: int = Field(0, ge=0, description="Largest batch, if smaller than the model's own; 0: the model's own.")
    edges: Text = Field(
        "auto",
        description="Deprecated and ignored: the server is always one process.",
        json_schema_extra={"deprecated": True},
    )
    version_policy: Names = Field("latest", description="Versions to serve: latest, all, or numbers such as 1,3.")
    model_control: ControlMode = Field(
        "none", description="How models are loaded after startup: none, explicit (API), or poll (watch the store)."
    )
    load_model: Names = Field("", description="Models to load at startup (explicit only), such as a,b; * loads all.")
    load_timeout_s: float = Field(DEFAULT_LIMIT_S, gt=0, description="Seconds allowed for loading a version.")
    poll_interval_s: float = Field(2, gt=0, description="Seconds between checks of the store (poll only).")
    max_queue: int = Field(1024, ge=1, description="Maximum samples waiting per model; further requests get a 429.")
    max_inflight_mb: int = Field(
        1024, ge=1, description="Memory for requests and decoding, in MiB; requests beyond it get a 429."
    )
    max_body_mb: int = Field(64, ge=1, description="Largest request body, in MiB; larger ones get a 413.")
    max_pixels: int = Field(DEFAULT_MAX_PIXELS, ge=1, description="Maximum pixels per image; larger images get a 400.")
    default_timeout_ms: float = Field(
        0,
        ge=0,
        description="Deadline of requests without one, in milliseconds; 0: none.",
        json_schema_extra=LIVE,
    )
    drain_delay_s: float = Field(0, ge=0, description="Seconds to keep serving, reported as not ready, after SIGTERM.")
    drain_timeout_s: float = Field(30, ge=0, description="Seconds to finish accepted requests after the drain delay.")
    max_connections: int = Field(4096, ge=1, description="Maximum open connections; further ones get a 503.")
    header_timeout_s: float = Field(10, gt=0, description="Seconds allowed for receiving the headers of a request.")
    body_timeout_s: float = Field(10, gt=0, description="Seconds allowed for receiving a body, plus 1 s per 256 KiB.")
    write_timeout_s: float = Field(30, gt=0, description="Seconds that a client may stall while reading its response.")
    allow_shared_memory: bool = Field(False, description="Allow clients to register system shared memory.")
    server_name: str = Field("convoy", description="Server name reported by /v2; some clients expect 'triton'.")
    api_key_file: Path | None = Field(
        None, description="File with the API key that clients must send.", json_schema_extra=LIVE
    )
    admin_token_file: Path | None = Field(
        None, description="File with the token for loading and unloading models.", json_schema_extra=LIVE
    )
    require_signature: Names = Field(
        "", description="Public key files, such as a.pem,b.pem; bundles without a matching signature are not loaded."
    )
    tls_cert_file: Path | None = Field(
        None,
        description="PEM file with the certificate and its chain; turns TLS on for HTTP and gRPC.",
        json_schema_extra=LIVE,
    )
    tls_key_file: Path | None = Field(
        None, description="PEM file with the private key; default: the certificate file.", json_schema_extra=LIVE
    )
    tls_client_ca_file: Path | None = Field(
        None,
        description="PEM file with the CA of client certificates; clients must then present one.",
        json_schema_extra=LIVE,
    )
    allowed_host: Names = Field(
        "",
        description="Host names, such as a,b, whose web pages may load models without a token.",
        json_schema_extra=LIVE,
    )
    # Logging each request costs a fifth of a small one; the statistics count successful ones.
    access_log: Literal["all", "errors", "off"] = Field(
        "errors", description="Requests to log; errors logs failed and slow ones.", json_schema_extra=LIVE
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level of messages to log.", json_schema_extra=LIVE
    )
    log_format: LogFormat = Field("text", description="Format of the log; json writes one object per line.")
    tracing: bool = Field(False, description="Send OpenTelemetry spans (extra otel); configure with OTEL_* variables.")
    cors_origins: Names = Field(
        "",
        description="Origins that browsers may call from, such as https://a.example; * allows all.",
        json_schema_extra=LIVE,
    )
    keys: dict[str, Path] = Field(
        default_factory=dict,
        description="Files with one API key each, by the name used in the log.",
        json_schema_extra=LIVE,
    )
    models: dict[str, ModelSettings] = Field(
        default_factory=dict, description="Options of single models, by model name."
    )

    @field_validator("engine")
    @classmethod
    def _is_in_the_table(cls, engine: str) -> str:
        if engine not in CHOICES:
            raise ValueError(f"choose from {', '.join(CHOICES)}")
        return engine

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        if self.max_inflight_mb < self.max_body_mb:
            raise ValueError("max_inflight_mb must be at least max_body_mb, or a body of that size could not be read")
        self.versions()
        is_number = self.edges.isascii() and self.edges.isdigit() and int(self.edges) <= 64
        if self.edges != "auto" and not is_number:
            raise ValueError(f"edges must be auto or a number from 0 to 64, got {self.edges!r}")
        if self.load_model and self.model_control != "explicit":
            raise ValueError("load_model needs model_control explicit; otherwise everything in the store is loaded")
        self._check_names()
        self._allowed_hosts()
        self._cors_origins()
        self._check_key_names()
        if self.tls_cert_file is None and (self.tls_key_file or self.tls_client_ca_file):
            raise ValueError("tls_key_file and tls_client_ca_file need tls_cert_file, which turns TLS on")
        return self

    @property
    def sources(self) -> Sources:
        """The source of each option."""
        return self._sources

    @property
    def scheme(self) -> str:
        """The scheme of the server's URLs."""
        return "http" if self.tls_cert_file is None else "https"

    def options(self) -> Iterator[OptionHeld]:
        """Every option, with the given ones of single models."""
        fields, of_models = type(self).model_fields, ModelSettings.model_fields
        held: list[tuple[tuple[str, ...], Any, FieldInfo]] = [
            *(((name,), getattr(self, name), field) for name, field in fields.items() if not has_names(field)),
            *((("keys", name), path, fields["keys"]) for name, path in self.keys.items()),
            *(
                (("models", model, name), getattr(own, name), of_models[name])
                for model, own in self.models.items()
                for name in of_models
                if name in own.model_fields_set
            ),
        ]
        for keys, value, field in held:
            extra = field.json_schema_extra
            yield OptionHeld(keys, value, isinstance(extra, dict) and LIVE.items() <= extra.items())

    def read_again(self) -> Settings:
        """Read the sources again, with the same command line. Raises UsageError."""
        return read_settings(self._sources.command_line)

    def _allowed_hosts(self) -> tuple[str, ...]:
        """Without their ports. Raises ValueError."""
        hosts = {given: host_name(given) for given in _names(self.allowed_host)}
        if wrong := [given for given, name in hosts.items() if not name]:
            raise ValueError(f"allowed_host must be names such as a.example,b.example; got {wrong[0]!r}")
        return tuple(hosts.values())

    def _cors_origins(self) -> tuple[str, ...]:
        """Raises ValueError."""
        origins = _names(self.cors_origins)
        if wrong := [one for one in origins if one != "*" and not _ORIGIN.fullmatch(one)]:
            raise ValueError(f"cors_origins must be origins such as https://a.example:8443, or *; got {wrong[0]!r}")
        return origins

    def _check_key_names(self) -> None:
        for name in self.keys:
            if not _KEY_NAME.fullmatch(name) or name in (ADMIN, DEFAULT_KEY):
                raise ValueError(
                    f"keys: {name!r} cannot be a key's name; use letters, digits, '.', '_' and '-', and neither "
                    f"{ADMIN!r} nor {DEFAULT_KEY!r}, which --admin-token-file and --api-key-file use"
                )

    def _check_names(self) -> None:
        asked: dict[str, set[str]] = {
            "load_model": set(_names(self.load_model)) - {EVERYTHING},
            "model_name": {self.model_name} - {""},
            "models": set(self.models),
        }
        for option, names in asked.items():
            try:
                for name in names:
                    check_name(name)
            except UsageError as error:
                raise ValueError(f"{option}: {error}") from error

    def versions(self) -> Policy:
        """The version policy, parsed. Raises ValueError."""
        if self.version_policy == "latest":
            return Latest()
        if self.version_policy == "all":
            return "all"
        numbers = self.version_policy.split(",")
        if not all(number.strip().isdigit() for number in numbers):
            raise ValueError(f"version_policy must be latest, all, or numbers such as 1,3; got {self.version_policy!r}")
        return tuple(int(number) for number in numbers)

    def plan_folder(self) -> Path:
        """The folder of plans and tuning results. Raises UsageError."""
        return plan_folder(self.plan_cache)

    def store_place(self) -> Path | RemoteStore:
        """The store's folder, or the remote store. Raises UsageError if that needs something that is not installed."""
        if self.store is None or not is_url(self.store):
            return DEMO_STORE if self.store is None else Path(self.store)
        return RemoteStore(self.store, self.model_name, self.store_cache_folder())

    def store_cache_folder(self) -> Path:
        """The folder for what a remote store provides. Raises UsageError."""
        if self.store_cache is not None:
            return self.store_cache.expanduser()
        plans = self.plan_folder()
        return plans.with_name(f"{plans.name}-store")

    def core_options(self) -> CoreOptions:
        signing_keys = tuple(Path(one).expanduser() for one in _names(self.require_signature))
        signed = SignedOnly.by(signing_keys, self.store_cache_folder() / "signed") if signing_keys else None
        load = LoadOptions(
            self.precision,
            self.threads or cpu_budget(),
            self.max_batch or None,
            engine=self.engine,
            machine=self._machine(),
            plan_cache=self.plan_folder(),
            limit_s=self.load_timeout_s,
            signed=signed,
        )
        return CoreOptions(
            store=self.store_place(),
            load=load,
            load_by_model=self.load_by_model(load),
            control=ControlOptions(self.model_control, self.versions(), self.poll_interval_s, _names(self.load_model)),
            model_name=self.model_name,
            queues=self.queue_rules(),
            max_inflight_bytes=self.max_inflight_mb << 20,
            allow_shared_memory=self.allow_shared_memory,
        )

    def load_by_model(self, load: LoadOptions) -> dict[str, LoadOptions]:
        """The load options of models that have their own."""
        return {name: own.load_options(load) for name, own in self.models.items()}

    def queue_rules(self) -> QueueRules:
        by_model = {
            name: QueueOptions(own.max_queue, own.priority_levels, own.default_priority)
            for name, own in self.models.items()
        }
        return QueueRules(self.max_queue, by_model)

    def _machine(self) -> Machine:
        """The hardware that may serve; other hardware is not probed."""
        if self.engine == REFERENCE.runner:
            return CPU_ONLY
        return find_machine() if may_use_gpus(self.engine) else find_cpu()

    def serve_options(self) -> ServeOptions:
        """Raises UsageError for a secret or a certificate that cannot be read."""
        tls = None
        if self.tls_cert_file is not None:
            tls = ServerTls.read(self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file)
        return ServeOptions(
            body=BodyLimits(self.max_body_mb << 20, self.body_timeout_s),
            decode_threads=cpu_budget(),
            max_decoding=self.max_queue,
            max_pixels=self.max_pixels,
            default_timeout_ms=self.default_timeout_ms,
            timeouts_ms={
                name: own.default_timeout_ms for name, own in self.models.items() if own.default_timeout_ms is not None
            },
            server_name=self.server_name,
            api_keys=self._api_keys(),
            admin_token=None if self.admin_token_file is None else _secret("--admin-token-file", self.admin_token_file),
            is_loopback=is_loopback(self.host),
            allowed_hosts=self._allowed_hosts(),
            cors_origins=self._cors_origins(),
            tls=tls,
            access_log=self.access_log,
        )

    def _api_keys(self) -> tuple[ApiKey, ...]:
        """Raises UsageError."""
        files = {name: (f"keys.{name}", path) for name, path in self.keys.items()}
        if self.api_key_file is not None:
            files[DEFAULT_KEY] = ("--api-key-file", self.api_key_file)
        return tuple(ApiKey(name, _secret(option, path)) for name, (option, path) in files.items())

    def connection_limits(self) -> ConnectionLimits:
        return ConnectionLimits(
            header_timeout_s=self.header_timeout_s,
            write_timeout_s=self.write_timeout_s,
            linger_s=self.body_timeout_s,
            max_connections=self.max_connections,
        )


def read_settings(given: Mapping[str, Any]) -> Settings:
    """Settings from the command line, then the environment, the file, the defaults.

    Raises UsageError.
    """
    sources = Sources.read(given, Settings)
    try:
        settings = Settings(**sources.merged())
    except ValidationError as error:
        raise sources.not_valid(error, Settings) from error
    settings._sources = sources
    return settings


def _secret(option: str, path: Path) -> str:
    """The content of a file with a secret. Raises UsageError."""
    try:
        secret = path.read_text().strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"{option} {path} cannot be read: {error}") from error
    if not secret:
        raise UsageError(f"{option} {path} is empty; put the secret on its first line")
    return secret


def has_names(field: FieldInfo) -> bool:
    """Whether an option has values by name, which the command line cannot express."""
    return get_origin(field.annotation) is dict


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
