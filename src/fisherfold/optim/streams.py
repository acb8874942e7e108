"""Independent pieces of work as parallel branches of a captured CUDA graph.

Work is dealt to a few side streams that fork from the current one and join it again, so that kernels too small to fill
the device run side by side when the graph is replayed. The uncaptured steps before a capture take the same way, so that
every stream has its workspaces by then. Workspaces belong to streams: optimizers whose graphs are replayed side by side
must not share them, so each has streams of its own. (PyTorch deals them from a pool of 32 per device.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

N_BRANCHES = 4


class Branches:
    """The side streams of one optimizer, made where they are first needed; a copy starts without any."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, tuple[Any, ...]] = {}

    def __reduce__(self) -> tuple[type[Branches], tuple[()]]:
        return Branches, ()

    def streams(self, device: torch.device) -> tuple[Any, ...]:
        """The side streams on a device.

        Args:
            device: a CUDA device.

        Returns:
            The same streams every time.
        """
        if device not in self._streams:
            self._streams[device] = tuple(torch.cuda.Stream(device) for _ in range(N_BRANCHES))  # type: ignore[no-untyped-call]
        return self._streams[device]

    def run(self, function: Callable[..., None], jobs: Sequence[tuple[Any, ...]], *, parallel: bool) -> None:
        """Call a function on each of the jobs, which must not depend on each other.

        Args:
            function: the work.
            jobs: its arguments; the first of each is a tensor. Those with large ones come first, as they take longest.
            parallel: whether to use side streams, on CUDA.
        """
        jobs = sorted(jobs, key=lambda job: -job[0].numel())
        devices = {job[0].device for job in jobs if parallel and job[0].is_cuda}
        for job in jobs:
            if job[0].device not in devices:
                function(*job)
        for device in devices:
            self._fork(function, [job for job in jobs if job[0].device == device], device)

    def _fork(self, function: Callable[..., None], jobs: Sequence[tuple[Any, ...]], device: torch.device) -> None:
        main, streams = torch.cuda.current_stream(device), self.streams(device)
        for stream in streams:
            stream.wait_stream(main)
        for index, job in enumerate(jobs):
            with torch.cuda.stream(streams[index % N_BRANCHES]):
                function(*job)
        for stream in streams:
            main.wait_stream(stream)
