"""`python -m convoy.export.sources.torch_child FOLDER` does the job that lies in the folder."""

import sys
from pathlib import Path

from convoy.export.sources.torch_child.child import main

main(Path(sys.argv[1]))
