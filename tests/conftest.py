"""One thread per test process: the problems are small, and two processes share two cores.

Processes that tests start, where it is not the start itself that is tested, are forked from a server that has imported
what they need (``forkserver``), which costs those seconds once.

No example of hypothesis has a deadline: how busy a machine is says nothing about the code.
"""

from multiprocessing import set_forkserver_preload

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")
set_forkserver_preload(
    ["torch._dynamo", "pytest", "fisherfold.completion", "fisherfold.solvers", "fisherfold.optim"]
)
