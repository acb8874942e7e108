"""Independent pieces of work as parallel branches of a captured CUDA graph.

Inside a capture, work is dealt to a few side streams that fork from the current one and join it again, so that kernels
too small to fill the device run side by side when the graph is replayed; anywhere else it simply runs in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

N_BRANCHES = 4


def in_parallel(function: Callable[..., None], jobs: Sequence[tuple[Any, ...]]) -> None:
    """Call a function on each of the jobs, which must not depend on each other.

    Args:
        function: the work.
        jobs: its arguments; the first of each is a tensor.
    """
    if not (jobs and jobs[0][0].is_cuda and torch.cuda.is_current_stream_capturing()):
        for job in jobs:
            function(*job)
        return
    main = torch.cuda.current_stream()
    branches = _branches(jobs[0][0].device)
    for branch in branches:
        branch.wait_stream(main)
    for index, job in enumerate(jobs):
        with torch.cuda.stream(branches[index % N_BRANCHES]):
            function(*job)
    for branch in branches:
        main.wait_stream(branch)


@lru_cache
def _branches(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(N_BRANCHES))  # type: ignore[no-untyped-call]
