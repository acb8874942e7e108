"""What a method carries from one iteration to the next, and how it is kept in a file.

Everything is in tensors and plain numbers, so that a run resumed from a checkpoint continues to the
same bits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fisherfold.distributed import ALONE, Content, Group
from fisherfold.files import read_tensors, sound, write_tensors
from fisherfold.manifolds.base import Point, leaves, unflatten_like
from fisherfold.solvers.identity import difference
from fisherfold.solvers.result import Trace

KIND, VERSION = "checkpoint", 3


@dataclass
class State:
    """The state of a run between two iterations.

    Attributes:
        x: the iterate.
        generator: the source of all randomness.
        loss: the loss over all samples at ``x``, NaN if not evaluated.
        gradient_norm: the norm of the gradient over all samples at ``x``, NaN if not evaluated.
        iteration: iterations made.
        samples: sample gradients evaluated.
        products: sample Fisher products evaluated.
        seconds: solver time spent.
        numbers: the method's memory in numbers.
        vectors: the method's memory in points and tangent vectors.
        record: further columns of the trace for the last iteration.
        options: of the method, as text.
        identity: of the problem, start and seed, for checkpoints.
        before: the iterate before the last step that moved; None if none has.
        failure: why no further step can be made with these options: (status, sentence).
        best: the point with the lowest loss seen.
        best_loss: that loss.
        trace: the table of the run so far.
        curvature: measures that of the loss along its gradient at ``x``, for criteria that ask;
            None outside of a run.
    """

    x: Point
    generator: torch.Generator
    loss: float = float("nan")
    gradient_norm: float = float("nan")
    iteration: int = 0
    samples: int = 0
    products: int = 0
    seconds: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)
    vectors: dict[str, Point] = field(default_factory=dict)
    record: dict[str, float] = field(default_factory=dict)
    options: str = ""
    identity: dict[str, Any] = field(default_factory=dict)
    failure: tuple[str, str] | None = None
    before: Point = None
    best: Point = None
    best_loss: float = float("inf")
    trace: Trace = field(default_factory=Trace)
    curvature: Callable[[], float] | None = field(default=None, repr=False, compare=False)

    _COUNTERS = (
        "loss",
        "gradient_norm",
        "iteration",
        "samples",
        "products",
        "seconds",
        "best_loss",
    )

    def copy(self) -> State:
        """The state as it is now, untouched by later steps.

        Tensors are shared, since no step changes one in place.
        """
        generator = torch.Generator()
        generator.set_state(self.generator.get_state())
        memory = (
            dict(self.numbers),
            dict(self.vectors),
            dict(self.record),
            Trace(list(self.trace.rows)),
        )
        numbers, vectors, record, trace = memory
        return replace(
            self, generator=generator, numbers=numbers, vectors=vectors, record=record, trace=trace
        )

    def save(self, path: str | os.PathLike[str], *, method: str, tag: str = "") -> None:
        """Write a checkpoint, atomically."""
        # the trace as a tensor of its own: a header, which holds some ten thousand rows, is too
        # small for long runs
        trace = torch.frombuffer(bytearray(json.dumps(self.trace.rows).encode()), dtype=torch.uint8)
        tensors = {"generator": self.generator.get_state(), "trace": trace}
        memory = {f"vectors.{name}": tree for name, tree in self.vectors.items()}
        for name, tree in {"x": self.x, "best": self.best, **memory}.items():
            tensors |= _named(name, tree)
        header = {name: getattr(self, name) for name in self._COUNTERS}
        header |= {
            "method": method,
            "tag": tag,
            "numbers": self.numbers,
            "vectors": list(self.vectors),
        }
        header |= {"options": self.options, "failure": self.failure, "identity": self.identity}
        write_tensors(path, tensors, kind=KIND, version=VERSION, header=header)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        method: str,
        like: Point,
        tag: str = "",
        identity: dict[str, Any] | None = None,
        group: Group = ALONE,
    ) -> State | None:
        """Read a checkpoint, if the file exists.

        ``method``, ``tag``, ``identity``: of the run; raises ValueError if those of the file are
        others. An identity that is not given is not compared.
        """
        found: Content | None = None
        with group.together():
            if group.is_first and Path(path).exists():
                found = _read(path, method, tag)
        if (told := group.tell(found)) is None:
            return None
        with group.together(), sound(path, KIND):
            state = cls._of(*told, like, path)
            if identity is not None:
                _check_identity(path, state.identity, identity, leaves(like)[0].dtype)
            return state

    @classmethod
    def _of(
        cls,
        tensors: dict[str, Tensor],
        header: dict[str, Any],
        like: Point,
        path: str | os.PathLike[str],
    ) -> State:
        generator = torch.Generator()
        generator.set_state(tensors.pop("generator"))
        state = cls(x=_restored("x", tensors, like, path), generator=generator)
        state.best = _restored("best", tensors, like, path)
        for name in cls._COUNTERS:
            whole = name in ("iteration", "samples", "products")
            setattr(state, name, int(header[name]) if whole else float(header[name]))
        state.numbers = {name: float(value) for name, value in header["numbers"].items()}
        state.vectors = {
            name: _restored(f"vectors.{name}", tensors, like, path) for name in header["vectors"]
        }
        rows = json.loads(tensors.pop("trace").numpy().tobytes())
        state.trace = Trace([{str(name): value + 0 for name, value in row.items()} for row in rows])
        state.identity = dict(header.get("identity", {}))
        state.options = str(header.get("options", ""))
        if (failure := header.get("failure")) is not None:
            status, sentence = failure
            state.failure = (str(status), str(sentence))
        if tensors:
            raise ValueError(
                f"{path} is a checkpoint of another problem: it also holds {sorted(tensors)}"
            )
        return state


def _read(path: str | os.PathLike[str], method: str, tag: str) -> Content:
    tensors, header = read_tensors(path, kind=KIND, version=VERSION)
    if header.get("method") != method:
        raise ValueError(
            f"{path} is a checkpoint of method {header.get('method')!r}, not of {method!r}"
        )
    if header.get("tag", "") != tag:
        raise ValueError(
            f"{path} is a checkpoint of another problem; remove the file or name another one"
        )
    return tensors, header


def _check_identity(
    path: str | os.PathLike[str], saved: dict[str, Any], now: dict[str, Any], dtype: torch.dtype
) -> None:
    rounding = torch.finfo(dtype).eps ** 0.5
    if found := difference(saved, now, rounding):
        raise ValueError(
            f"{path} is a checkpoint of another problem: {found}; remove the file or name another "
            "one"
        )


def _named(name: str, tree: Point) -> dict[str, Tensor]:
    if isinstance(tree, dict):
        return {
            key: leaf
            for branch, sub in tree.items()
            for key, leaf in _named(f"{name}/{branch}", sub).items()
        }
    return {name: tree}


def _restored(
    name: str, tensors: dict[str, Tensor], like: Point, path: str | os.PathLike[str]
) -> Point:
    parts = []
    for key, leaf in _named(name, like).items():
        part = tensors.pop(key, None)
        if part is None or part.shape != leaf.shape or part.dtype != leaf.dtype:
            raise ValueError(
                f"{path} is a checkpoint of another problem: its {key} does not fit the starting "
                "point"
            )
        if name in {"x", "best"} and not bool(torch.isfinite(part).all()):
            raise ValueError(f"its {key} is not finite")
        parts.append(part.to(leaf.device))
    return unflatten_like(parts, like)
