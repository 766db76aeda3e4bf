"""`python -m tests.gpu.proof.child MODULE:FUNCTION ARGUMENTS NOTES RESULTS LIMIT_S`: one experiment's process."""

from __future__ import annotations

import importlib
import json
import resource
import sys
import traceback
from pathlib import Path

from tests.gpu.proof.experiment import Bench, NotMeasurable


def main(arguments: list[str]) -> int:
    path, given, notes, results, limit_s = arguments
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an answer, and its image would fill the disk
    bench = Bench(Path(notes), Path(results), float(limit_s))
    module, _, function = path.partition(":")
    try:
        getattr(importlib.import_module(module), function)(bench, **json.loads(given))
    except NotMeasurable as reason:
        bench.write(not_measurable=str(reason))
    except Exception as error:  # whatever a library raises; the parent judges
        traceback.print_exc()
        bench.write(failed=" ".join(f"{type(error).__name__}: {error}".split())[:600])
        return 1
    else:
        bench.write(done=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
