"""What the operator can set for one model: in the file, under `models`, by the model's name.

Where an option is left out, that of the whole server holds, or what the model says of itself.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from convoy.app.engines.select import PrecisionChoice
from convoy.app.lifecycle.model_lifecycle import QueueOptions
from convoy.app.loading.load import LoadOptions

# Marks an option that SIGHUP can change, in the schema as well.
LIVE: JsonDict = {"changes_on_sighup": True}


class ModelSettings(BaseModel):
    """The options of one model, for all of its versions."""

    model_config = ConfigDict(extra="forbid")

    max_batch: int | None = Field(None, ge=1, description="Largest batch, if below the model's own.")
    max_queue: int | None = Field(None, ge=1, description="Samples that may wait.", json_schema_extra=LIVE)
    default_timeout_ms: float | None = Field(
        None, ge=0, description="Deadline of requests that name none; 0: none.", json_schema_extra=LIVE
    )
    priority_levels: int | None = Field(
        None, ge=1, description="Levels that requests may ask for, 1 the most urgent.", json_schema_extra=LIVE
    )
    default_priority: int | None = Field(
        None, ge=1, description="Level of requests that ask for none.", json_schema_extra=LIVE
    )
    instances: int | None = Field(None, ge=1, description="Its engines on the CPU, which compute at the same time.")
    threads: int | None = Field(
        None,
        ge=1,
        description="Threads of each of its engines on the CPU; by default the server's, over its instances.",
    )
    precision: PrecisionChoice | None = Field(None, description="Which variant of a bundle serves.")
    warm_up_runs: int | None = Field(
        None, ge=1, description="How often each batch size is run before the model serves; once is the least."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> ModelSettings:
        levels, default = self.priority_levels, self.default_priority
        if levels is not None and default is not None and default > levels:
            raise ValueError(f"default_priority must be from 1 to priority_levels, {levels}; got {default}")
        return self

    def load_options(self, load: LoadOptions) -> LoadOptions:
        """The server's, with what is otherwise for this model."""
        return replace(
            load,
            precision=self.precision or load.precision,
            threads=self.threads or max(1, load.threads // (self.instances or 1)),
            instances=self.instances or load.instances,
            max_batch=self.max_batch or load.max_batch,
            warm_up_runs=self.warm_up_runs or load.warm_up_runs,
        )

    def queue_options(self) -> QueueOptions:
        return QueueOptions(self.max_queue, self.priority_levels, self.default_priority)
