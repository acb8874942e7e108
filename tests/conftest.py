"""One thread per test process: the problems are small, and two processes share two cores.

Processes that tests start, where it is not the start itself that is tested, are forked from a server that has imported
what they need (``forkserver``), which costs those seconds once.
"""

from multiprocessing import set_forkserver_preload

import torch

torch.set_num_threads(1)
set_forkserver_preload(
    ["torch._dynamo", "pytest", "fisherfold.estimators", "fisherfold.solvers", "fisherfold.inference.completion",
     "fisherfold.optim", "fisherfold.training"]
)  # fmt: skip
