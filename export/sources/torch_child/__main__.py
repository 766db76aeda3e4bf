"""`python -m convoy.export.sources.torch_child FOLDER` answers the question in the folder.

Errors are one line in the answer. What torch prints goes where the parent sent it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from pathlib import Path

from convoy.export.sources import torch_job as files
from convoy.export.sources.torch_child import registries
from convoy.export.sources.torch_job import Description, Inquiry, TorchJob, TorchOutcome
from convoy.models.errors import ConvoyError, UsageError
from convoy.models.records import from_jsonable, to_jsonable


def main(folder: Path) -> None:
    """Answer the question in `folder`. Every ending except sudden death writes an answer."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    if (folder / files.INQUIRY).exists():
        inquiry = from_jsonable(Inquiry, json.loads((folder / files.INQUIRY).read_text()), files.INQUIRY)
        (folder / files.DESCRIPTION).write_text(json.dumps(to_jsonable(_describe(inquiry))))
        return
    job = from_jsonable(TorchJob, json.loads((folder / files.JOB).read_text()), files.JOB)
    (folder / files.OUTCOME).write_text(json.dumps(to_jsonable(_export(job, folder))))


def _die_with_parent() -> None:
    # The parent holds the other end of stdin open; it closes even if the parent is killed.
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _describe(inquiry: Inquiry) -> Description:
    try:
        if inquiry.file is not None and inquiry.is_transform:
            from convoy.export.sources.transforms import read_transform

            return Description(transform=read_transform(Path(inquiry.file), inquiry.name))
        if inquiry.file is not None:
            from convoy.export.sources.torch_child import networks

            if inquiry.is_about_metadata:
                return networks.described(inquiry)
            if inquiry.is_about_weights:
                return Description(is_random=networks.is_untrained(inquiry))
            return Description(channels=networks.channels_taken(inquiry))
        return registries.describe(inquiry)
    except ConvoyError as error:
        return Description(error=" ".join(str(error).split()), is_wrong_call=isinstance(error, UsageError))


def _export(job: TorchJob, folder: Path) -> TorchOutcome:
    try:
        from convoy.export.sources.torch_child import child
    except ImportError as error:
        problem = f"export needs torch, which does not load here ({error}); run `make test` once"
        return TorchOutcome(problem, (), "")
    return child.export(job, folder)


# torch and the graphs are a million objects with hardly any garbage; scanning them takes a tenth of the job.
gc.set_threshold(100_000, 20, 20)
main(Path(sys.argv[1]))
