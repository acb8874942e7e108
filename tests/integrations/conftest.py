"""torchvision, which these packages import, also where its operators do not fit the installed build of torch."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "optim"))
from vision import declare  # isort: skip

declare()
