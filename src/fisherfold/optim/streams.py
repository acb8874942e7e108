"""Independent pieces of work as parallel branches of a captured CUDA graph.

Work is dealt to a few side streams that fork from the current one and join it again, so that kernels too small to fill
the device run side by side when the graph is replayed. The uncaptured steps before a capture take the same way, so that
every stream has its workspaces by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

N_BRANCHES = 4


def in_parallel(function: Callable[..., None], jobs: Sequence[tuple[Any, ...]], *, branches: bool) -> None:
    """Call a function on each of the jobs, which must not depend on each other.

    Args:
        function: the work.
        jobs: its arguments; the first of each is a tensor.
        branches: whether to use side streams, on CUDA.
    """
    if not (branches and jobs and jobs[0][0].is_cuda):
        for job in jobs:
            function(*job)
        return
    main = torch.cuda.current_stream()
    streams = _streams(jobs[0][0].device)
    for stream in streams:
        stream.wait_stream(main)
    for index, job in enumerate(jobs):
        with torch.cuda.stream(streams[index % N_BRANCHES]):
            function(*job)
    for stream in streams:
        main.wait_stream(stream)


@lru_cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(N_BRANCHES))  # type: ignore[no-untyped-call]
