"""The processes that share one fit, as the few collective operations needed here.

    sum over ranks of x_r, the same bits on every rank

Solvers and problems never see ``torch.distributed``: they add up through a group, and a group of
one (``ALONE``) hands back what it is given. Where a process is waited for longer than 10 seconds,
one line on standard error names it; where one has ended, or does not answer before the timeout, the
others raise ``RankLost``.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

# What a file holds: named tensors and a header.
Content: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]
T = TypeVar("T")
# Ragged exchanges move this many rows per rank and round, so that their buffers stay small.
_ROUND = 2**19
_PATIENCE = 10.0  # seconds until it is said who is waited for
_FAREWELL = 2.0  # seconds in which the processes that are left find each other
_NUMBERS = itertools.count()  # of the groups, which every process makes in the same order


class RankLost(RuntimeError):
    """A process of the group has ended or does not answer.

    Attributes:
        ranks: which ones; empty if it could not be found out.
    """

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


class Group:
    """A set of processes that call the same operations in the same order.

    Args:
        process_group: a group of ``torch.distributed``; its default group if not given.

    Attributes:
        size: how many processes there are.
        rank: the number of this one.

    Raises:
        ValueError: if the group can carry nothing but tensors of GPUs, or does not have this
            process.
    """

    def __init__(self, process_group: Any = None) -> None:
        self._handle = process_group
        self.size: int = distributed.get_world_size(process_group)
        self.rank: int = distributed.get_rank(process_group)
        if self.rank < 0:
            raise ValueError(
                "this process is not a member of the process_group: only its members can share the "
                "fit"
            )
        if distributed.get_backend(process_group) == "nccl":
            raise ValueError(
                "the group has the backend nccl alone, which carries no tensors of a CPU: start "
                "torch.distributed with gloo, or with 'cpu:gloo,cuda:nccl' where GPUs talk to each "
                "other too"
            )
        self._calls = 0
        self._since = math.inf
        self._store: Any = None
        if process_group is None and self.size > 1:
            with contextlib.suppress(Exception):  # private to torch; without it nobody is named
                store = distributed.distributed_c10d._get_default_store()
                self._store = PrefixStore(f"fisherfold/group {next(_NUMBERS)}", store)
                threading.Thread(
                    target=_watch, args=(weakref.ref(self),), daemon=True, name="fisherfold-watch"
                ).start()

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and speaks for all."""
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """Add up one tensor per process."""
        return self._reduce(x, distributed.ReduceOp.SUM)

    def largest(self, x: Tensor) -> Tensor:
        """Find the largest entries over all processes."""
        return self._reduce(x, distributed.ReduceOp.MAX)

    def _reduce(self, x: Tensor, operation: Any) -> Tensor:
        if self.size == 1:
            return x
        joint = x.detach().clone(memory_format=torch.contiguous_format)
        with self._guarded():
            distributed.all_reduce(joint, op=operation, group=self._handle)
        return joint

    def gather(self, part: Tensor) -> Tensor:
        """Join one table per process.

        ``part``: rows of this process; their number may differ between processes.
        """
        if self.size == 1:
            return part
        counts = torch.zeros(self.size, dtype=torch.int64)
        counts[self.rank] = len(part)
        sizes = self.sum(counts).tolist()
        whole = part.new_empty((sum(sizes), *part.shape[1:]))
        for source, piece in enumerate(torch.split(whole, sizes)):
            if source == self.rank:
                piece.copy_(part)
            if len(piece):
                self._broadcast(piece, source)
        return whole

    def _broadcast(self, x: Tensor, source: int) -> None:
        with self._guarded():
            distributed.broadcast(x, src=self._root(source), group=self._handle)

    def _root(self, source: int) -> int:
        return source if self._handle is None else distributed.get_global_rank(self._handle, source)

    def exchange(self, rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Send each process its rows of a table.

        ``rows``: a table whose first ``counts[0]`` rows go to rank 0, the next ``counts[1]`` to
        rank 1, and so on.
        """
        if self.size == 1:
            return [rows]
        matrix = self.gather(torch.tensor(counts, dtype=torch.int64)[None])
        incoming = matrix[:, self.rank].tolist()
        arrived: list[list[Tensor]] = [[] for _ in range(self.size)]
        parts = torch.split(rows, list(counts))
        for done in range(0, max(int(matrix.max()), 1), _ROUND):
            out = [part[done : done + _ROUND] for part in parts]
            back = [max(0, min(_ROUND, count - done)) for count in incoming]
            received = rows.new_empty((sum(back), *rows.shape[1:]))
            with self._guarded():
                distributed.all_to_all_single(
                    received,
                    torch.cat(out).contiguous(),
                    back,
                    list(map(len, out)),
                    group=self._handle,
                )
            for source, piece in enumerate(torch.split(received, back)):
                arrived[source].append(piece)
        return [torch.cat(pieces) for pieces in arrived]

    def gather_objects(self, mine: Any) -> list[Any]:
        """Gather one Python object of each process.

        ``mine``: plain data, such as numbers, text, lists and arrays.
        """
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        with self._guarded():
            distributed.all_gather_object(found, mine, group=self._handle)
        return found

    def tell(self, found: T) -> T:
        """Give what the first process has to all.

        ``found``: plain data or tensors, at the first process.
        """
        if self.size == 1:
            return found
        told = [found]
        with self._guarded():
            distributed.broadcast_object_list(told, src=self._root(0), group=self._handle)
        return told[0]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run a block in which one process may find a fault of the user's making.

        Then all of them raise its sentence.

        Without this the others would wait for the one that has left. The block must not call
        collective operations.
        """
        fault: Exception | None = None
        try:
            yield
        except (ValueError, TypeError, OSError) as error:
            fault = error
        if self.size == 1:
            if fault is not None:
                raise fault
            return
        # one small sum where nothing is wrong, as is usual
        if not int(self.sum(torch.tensor(int(fault is not None)))):
            return
        for rank, report in enumerate(
            self.gather_objects(None if fault is None else (_kind(fault), str(fault)))
        ):
            if report is not None:
                raise report[0](f"rank {rank}: {report[1]}") from fault

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Note since when this process waits; name who is lost."""
        self._calls = self._calls + 1
        self._since = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise self._verdict(error) from error
        finally:
            self._since = math.inf

    def _come(self, call: int) -> None:
        """Leave word that this process waits in an operation."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{call}/{self.rank}", "here")

    def _absent(self, call: int) -> list[int]:
        """The ranks that have not come to an operation at which others wait."""
        with contextlib.suppress(RuntimeError):
            return [rank for rank in range(self.size) if not self._store.check([f"{call}/{rank}"])]
        return []

    def _verdict(self, error: Exception) -> RankLost:
        lost = []
        if self._store is not None:
            self._come(self._calls)
            time.sleep(_FAREWELL)
            lost = self._absent(self._calls)
        who = ", ".join(f"rank {rank}" for rank in lost) or "another rank"
        return RankLost(
            f"{who} has ended or does not answer; rank {self.rank} stops. The report of torchrun "
            "says how each rank ended; a fit with a checkpoint goes on from there when it is "
            f"started again. torch.distributed: {str(error).splitlines()[0][:200]}",
            lost,
        )


def _watch(watched: weakref.ref[Group]) -> None:
    """Leave word where this process waits for longer than a second, and say so after ten.

    End with the group.
    """
    come = said = 0
    while (group := watched()) is not None:
        call = group._calls
        waited = time.monotonic() - group._since
        if waited > 1 and call > come:
            come = call
            group._come(call)
        if waited > _PATIENCE and call > said:
            said = call
            if lost := group._absent(call):
                who = ", ".join(f"rank {rank}" for rank in lost)
                text = f"rank {group.rank} has waited {waited:.0f} s for {who}, and waits on"
                print(text, file=sys.stderr, flush=True)
        del group  # it lives as long as its fit, and not for this thread
        time.sleep(0.5)


_KINDS = (FileNotFoundError, PermissionError, IsADirectoryError, OSError, TypeError, ValueError)


def _kind(fault: Exception) -> type[Exception]:
    """An exception of Python that every process knows."""
    return next(kind for kind in _KINDS if isinstance(fault, kind))


class _Alone(Group):
    """A group of one: nothing is sent."""

    def __init__(self) -> None:
        self._handle = None
        self.size = 1
        self.rank = 0

    def __reduce__(self) -> str:
        return "ALONE"


ALONE: Group = _Alone()


def current_group(process_group: Any = None) -> Group:
    """The group of this process, which all its members must ask for together.

    ``process_group``: a group of ``torch.distributed``; its default group if not given. Raises
    ValueError if ``torch.distributed`` is not initialised.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError(
            "a distributed fit needs torch.distributed.init_process_group, and a start with "
            "torchrun"
        )
    return Group(process_group)
