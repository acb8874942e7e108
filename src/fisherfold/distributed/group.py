"""The processes that share one fit, as the few collective operations that the rest of the library needs.

    sum over ranks of x_r, the same bits on every rank

Solvers and problems never see ``torch.distributed``: they add up through a group, and a group of one (``ALONE``) hands
back what it is given. A collective that fails because a process has ended is turned into ``RankLost``, which names it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed

from fisherfold.distributed.health import Health

# What a file holds: named tensors and a header.
Content: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]
# Ragged exchanges move this many rows per rank and round, so that their buffers stay small.
_ROUND = 2**19


class Group:
    """A set of processes that call the same operations in the same order.

    Args:
        process_group: a group of ``torch.distributed``; its default group if not given.

    Attributes:
        size: how many processes there are.
        rank: the number of this one.

    Raises:
        ValueError: if the group can carry nothing but tensors of GPUs, or does not have this process.
    """

    def __init__(self, process_group: Any = None) -> None:
        self._handle = process_group
        self.size: int = distributed.get_world_size(process_group)
        self.rank: int = distributed.get_rank(process_group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the process_group: only its members can share the fit")
        if distributed.get_backend(process_group) == "nccl":
            raise ValueError(
                "the group has the backend nccl alone, which carries no tensors of a CPU: start torch.distributed with "
                "gloo, or with 'cpu:gloo,cuda:nccl' where GPUs talk to each other too"
            )
        self._health: Health | None = None
        if self.size > 1:
            people = self._gather_text(Health.describe())
            self._health = Health(people, self.rank)

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and speaks for all."""
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """Add up one tensor per process.

        Args:
            x: of one shape on all processes.

        Returns:
            The sum over the processes, the same bits on each of them.
        """
        return self._reduce(x, distributed.ReduceOp.SUM)

    def largest(self, x: Tensor) -> Tensor:
        """The largest entries over all processes.

        Args:
            x: of one shape on all processes.

        Returns:
            A tensor like x.
        """
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

        Args:
            part: rows of this process; their number may differ between processes.

        Returns:
            All rows, in the order of the ranks.
        """
        if self.size == 1:
            return part
        counts = torch.zeros(self.size, dtype=torch.int64)
        counts[self.rank] = len(part)
        sizes = self.sum(counts).tolist()
        whole = part.new_empty((sum(sizes), *part.shape[1:]))
        start = 0
        for source, size in enumerate(sizes):
            piece = whole[start : start + size]
            if source == self.rank:
                piece.copy_(part)
            if size:
                self._broadcast(piece, source)
            start += size
        return whole

    def broadcast(self, x: Tensor | None, source: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Send a vector from one process to all.

        Args:
            x: the vector, at the source.
            source: its rank.
            dtype: of the vector.

        Returns:
            The vector.
        """
        if self.size == 1:
            assert x is not None
            return x
        length = torch.tensor([0 if x is None else len(x)], dtype=torch.int64)
        self._broadcast(length, source)
        content = x.contiguous() if source == self.rank and x is not None else torch.empty(int(length), dtype=dtype)
        if len(content):
            self._broadcast(content, source)
        return content

    def _broadcast(self, x: Tensor, source: int) -> None:
        root = source if self._handle is None else distributed.get_global_rank(self._handle, source)
        with self._guarded():
            distributed.broadcast(x, src=root, group=self._handle)

    def exchange(self, rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Send each process its rows of a table.

        Args:
            rows: a table whose first ``counts[0]`` rows go to rank 0, the next ``counts[1]`` to rank 1, and so on.
            counts: how many rows go to each rank.

        Returns:
            What came from each rank, in the order it was sent.
        """
        if self.size == 1:
            return [rows]
        sent = torch.tensor(counts, dtype=torch.int64)
        matrix = self.gather(sent[None])
        incoming = matrix[:, self.rank].tolist()
        arrived: list[list[Tensor]] = [[] for _ in range(self.size)]
        starts = [sum(counts[:k]) for k in range(self.size)]
        for done in range(0, max(int(matrix.max()), 1), _ROUND):
            out = [max(0, min(_ROUND, count - done)) for count in counts]
            back = [max(0, min(_ROUND, count - done)) for count in incoming]
            packed = torch.cat([rows[s + done : s + done + n] for s, n in zip(starts, out, strict=True)])
            received = rows.new_empty((sum(back), *rows.shape[1:]))
            with self._guarded():
                distributed.all_to_all_single(received, packed.contiguous(), back, out, group=self._handle)
            for source, piece in enumerate(torch.split(received, back)):
                arrived[source].append(piece)
        return [torch.cat(pieces) for pieces in arrived]

    def gather_texts(self, text: str) -> list[str]:
        """One text per process, on all of them.

        Args:
            text: this process's text.

        Returns:
            The texts in the order of the ranks.
        """
        return [text] if self.size == 1 else self._gather_text(text)

    def _gather_text(self, text: str) -> list[str]:
        said = bytearray(text.encode())
        mine = torch.frombuffer(said, dtype=torch.uint8) if said else torch.empty(0, dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(mine)
        found = []
        for source, length in enumerate(self.sum(lengths).tolist()):
            content = mine if source == self.rank else torch.empty(length, dtype=torch.uint8)
            if length:  # most often nobody has anything to say, and every message is waited for
                self._broadcast(content, source)
            found.append(content.numpy().tobytes().decode())
        return found

    def tell(self, found: Content | None) -> Content | None:
        """Give what the first process has read from a file to all.

        Args:
            found: named tensors and what JSON can hold, at the first process; None if it has found nothing.

        Returns:
            The same on every process.
        """
        if self.size == 1:
            return found
        tensors, header = found if found is not None else ({}, {})
        layout = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()]
        text = json.dumps({"found": found is not None, "header": header, "layout": layout}) if self.is_first else ""
        told = json.loads(self._gather_text(text)[0])
        if not told["found"]:
            return None
        joint: dict[str, Tensor] = {}
        for name, dtype, shape in told["layout"]:
            mine = tensors[name].flatten() if self.is_first else None
            joint[name] = self.broadcast(mine, 0, getattr(torch, dtype)).reshape(shape)
        return joint, told["header"]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run a block in which one process may find a fault of the user's making; then all of them raise its sentence.

        Without this the others would wait for the one that has left. The block must not call collective operations.
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
        mine = "" if fault is None else json.dumps([_kind(fault), str(fault)])
        for rank, report in enumerate(self._gather_text(mine)):
            if report:
                kind, sentence = json.loads(report)
                raise _KINDS[kind](f"rank {rank}: {sentence}") from fault

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if self._health is None:
                raise
            raise self._health.verdict(error) from error


_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ValueError, TypeError, FileNotFoundError, PermissionError, IsADirectoryError, OSError)
}


def _kind(fault: Exception) -> str:
    return next(name for name, kind in _KINDS.items() if isinstance(fault, kind))


class _Alone(Group):
    """A group of one: nothing is sent."""

    def __init__(self) -> None:
        self._handle, self.size, self.rank, self._health = None, 1, 0, None

    def __reduce__(self) -> str:
        return "ALONE"


ALONE: Group = _Alone()


def current_group(process_group: Any = None) -> Group:
    """The group of this process.

    Args:
        process_group: a group of ``torch.distributed``; its default group if not given.

    Returns:
        The group; all its members must call this together.

    Raises:
        ValueError: if ``torch.distributed`` is not initialised.

    Example:
        >>> current_group()
        Traceback (most recent call last):
        ...
        ValueError: a distributed fit needs torch.distributed.init_process_group, and a start with torchrun
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError("a distributed fit needs torch.distributed.init_process_group, and a start with torchrun")
    return Group(process_group)
