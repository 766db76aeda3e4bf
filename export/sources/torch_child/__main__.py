"""`python -m convoy.export.sources.torch_child FOLDER` does the job that lies in the folder."""

import gc
import sys
from pathlib import Path

from convoy.export.sources.torch_child.child import main

# torch and the graphs are a million objects, and hardly one is garbage: to look through them is a tenth of the job.
gc.set_threshold(100_000, 20, 20)
main(Path(sys.argv[1]))
