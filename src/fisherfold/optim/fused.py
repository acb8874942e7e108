"""The step on one GPU in a fixed number of launches, captured in a CUDA graph.

``FusedStep`` does for all parameters of a device what ``spheres``, ``spectral`` and AdamW do one
after the other; the kernels are those of ``kernels``. Addresses of gradients and rates are tables
on the device, which the host rewrites before the graph is replayed: gradients may move and
schedules may change rates. Weights and states must stay where they are; ``is_current`` tells.

A gradient that is not finite raises a flag on the device, and no weight moves until the host has
seen it. The host looks at a copy of the flag without waiting for the device, so that ``check``
raises one step late or later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from fisherfold.optim import kernels
from fisherfold.optim.distributed import is_sharded
from fisherfold.optim.layout import Entry, entries_of
from fisherfold.optim.loading import follow_
from fisherfold.optim.spectral import COEFFICIENTS
from fisherfold.optim.spheres import MARGIN, MAX_ANGLE

# The side of tiles, and of the blocks that the sides of matrices are rounded up to.
SIDE = 64
# How products with the long side of matrices run, and those of Gram matrices.
LONG = {"SIDE": SIDE, "num_warps": 4, "num_stages": 4}
SMALL = {"SIDE": SIDE, "num_warps": 4, "num_stages": 3}
# Elements that a program holds at a time of a vector, and of a row that is longer than that.
CHUNK = 512
LONG_CHUNK = 2048
# Iterations of Newton-Schulz that two Gram matrices serve.
ITERATIONS = range(2, 7)
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class OnSphere(NamedTuple):
    """A hidden matrix: its weight in float32, its momentum, its number of matrices.

    Name and group.
    """

    parameter: Tensor
    weight: Tensor
    momentum: Tensor
    splits: int
    name: str
    group: Mapping[str, Any]


class OffSphere(NamedTuple):
    """A parameter that gets AdamW: its weight in float32, its state, name and group."""

    parameter: Tensor
    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    name: str
    group: Mapping[str, Any]


def has_dense_rows(weight: Tensor) -> bool:
    """Whether each row is one piece of memory, in whatever order of its axes.

    And rows follow each other.
    """
    expected = 1
    for stride, size in sorted(zip(weight.stride()[1:], weight.shape[1:], strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return weight.dtype == torch.float32 and weight.stride(0) == expected


class FusedStep:
    """The step of all parameters of one device; states stay where they are.

    Args:
        spheres: the hidden matrices; ``has_dense_rows`` must hold for their weights, and momenta
            have their strides.
        others: the parameters that get AdamW; weights and states are dense and have the same
            strides.
        nesterov: whether the direction looks ahead.
        iterations: of Newton-Schulz, one of ``ITERATIONS``.
    """

    def __init__(
        self,
        spheres: Sequence[OnSphere],
        others: Sequence[OffSphere],
        *,
        nesterov: bool = True,
        iterations: int = 5,
    ) -> None:
        self.spheres = sorted(spheres, key=lambda s: str(_kind(s)))
        self.others = sorted(others, key=lambda o: str(o.parameter.dtype))
        self.nesterov = nesterov
        self.iterations = iterations
        items: list[OnSphere | OffSphere] = [*self.spheres, *self.others]
        self._names = [item.name for item in items]
        self.device = items[0].parameter.device
        self.parameters = [item.parameter for item in items]
        self.served = {id(p) for p in self.parameters}
        self._places = [p.data_ptr() for p in self.parameters]
        narrow = [item for item in items if item.weight.dtype != item.parameter.dtype]
        self._narrow = [item.parameter.detach() for item in narrow]
        self._masters = [item.weight for item in narrow]
        self._flag = torch.zeros(1, dtype=torch.int32, device=self.device)
        on_gpu = self.device.type == "cuda"
        self._seen = torch.zeros(1, dtype=torch.int32, pin_memory=True) if on_gpu else self._flag
        self._copied: Any = None
        self._graph: Any = None
        self._eager_steps = 0
        self._copies: dict[int, Tensor] = {}
        if self.spheres:
            self._lay_out_matrices()
        if self.others:
            self._lay_out_vectors()

    # ---------------------------------------------------------------------- the step

    def is_current(self) -> bool:
        """Whether all parameters are still in the memory that the tables point to."""
        return self._places == [p.data_ptr() for p in self.parameters]

    def check(self) -> None:
        """Raise if an earlier step had a gradient that was not finite.

        After that, steps move weights again.

        Raises:
            FloatingPointError: with the name of one such parameter, all of which are as they were
                before that step.
        """
        if self._copied is not None:
            if torch.cuda.is_current_stream_capturing() or not self._copied.query():
                return
            self._copied = None
        if found := int(self._seen):
            self._flag.zero_()
            self._seen.zero_()
            name = self._names[found - 1]
            raise FloatingPointError(
                f"the gradient of {name} was not finite in an earlier step; parameters are as "
                f"they were before it. "
                "Lower the learning rate, clip gradients, or use torch.amp.GradScaler with float16"
            )

    def step(self, factor: float = 1.0) -> None:
        """Perform a step: the first two launch by launch, later ones by replaying a graph of it.

        Args:
            factor: what the rates of all groups are multiplied by.

        Raises:
            RuntimeError: if the step is captured in a graph of the caller's before it has run once.
        """
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing and not self._eager_steps:
            raise RuntimeError(
                "the first step cannot be captured in a CUDA graph, since kernels are compiled "
                "in it: take one step "
                "before the capture"
            )
        self._write_tables(factor)
        if capturing or self.device.type != "cuda" or self._eager_steps < 2:
            self._launch()
            self._eager_steps += 1
        else:
            if self._graph is None:
                self._graph = torch.cuda.CUDAGraph()
                # other threads, of data loaders for one, may allocate meanwhile
                with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                    self._launch()
            self._graph.replay()
        if capturing or self.device.type != "cuda":
            return
        if self._copied is None or self._copied.query():
            self._seen.copy_(self._flag, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def _launch(self) -> None:
        for narrow, master in zip(self._narrow, self._masters, strict=True):
            follow_(master, narrow)
        if self.spheres:
            self._on_rows(
                kernels.momentum, MARGIN=MARGIN, NESTEROV=self.nesterov, with_gradient=True
            )
        if self.others:
            self._on_vectors(kernels.count, self._other_steps, self._flag, len(self.spheres))
        if self.spheres:
            self._orthogonalise()
            self._on_rows(kernels.rotate, MAX_ANGLE=MAX_ANGLE)
        if self.others:
            numbers = self._other_numbers.numbers
            self._on_vectors(
                kernels.adamw, self._other_steps, self._other_addresses, numbers, self._flag
            )
        if self._narrow:
            torch._foreach_copy_(self._narrow, self._masters)

    def _on_rows(self, kernel: Any, *, with_gradient: bool = False, **options: Any) -> None:
        for (dtype, aligned, chunk), first, count in self._row_launches:
            if with_gradient:
                options["GRADIENT"] = TYPES[dtype]
            kernel[(count,)](
                self._rows,
                self._addresses,
                self._gradients.numbers,
                self._numbers.numbers,
                self._scratch[0],
                self._squares,
                self._shares,
                self._flag,
                first,
                ALIGNED=aligned,
                CHUNK=chunk,
                **options,
            )

    def _on_vectors(self, kernel: Any, *tables: Any) -> None:
        for dtype, first, count in self._chunk_launches:
            gradients = self._other_gradients.numbers
            kernel[(count,)](
                self._chunks[first:], gradients, *tables, GRADIENT=TYPES[dtype], CHUNK=CHUNK
            )

    # ---------------------------------------------------------------------- Newton-Schulz

    def _orthogonalise(self) -> None:
        """Write Q(u) u over u, where Q is a product of polynomials of the Gram matrix of u."""
        if not len(self._gram_tiles):
            return
        u, x = self._scratch
        first = (self.iterations + 1) // 2
        self._with_long_side(kernels.gram, u, self._grams, SCALED=True)
        q = self._polynomials(first, u.dtype)
        self._with_long_side(kernels.apply, u, q, x, SCALED=True)
        self._with_long_side(kernels.gram, x, self._grams, SCALED=False)
        q = self._polynomials(self.iterations - first, x.dtype)
        self._with_long_side(kernels.apply, x, q, u, SCALED=False)

    def _polynomials(self, steps: int, dtype: torch.dtype) -> Tensor:
        """The product of P(G) = aI + bG + cG² over the iterations, with G <- P G P between them."""
        g, p, q, t, spare = range(len(self._grams))
        half = torch.float16
        self._product([g, g, q], polynomial=True, to=half if steps > 1 else dtype)
        if steps > 1:
            self._product([q, g, t])
            self._product([q, t, g])
        for step in range(1, steps):
            self._product([g, g, p], polynomial=True)
            if step == steps - 1:
                self._product([p, q, spare], to=dtype)
            else:
                self._product([p, q, spare, p, g, t])
                self._product([p, t, g])
            q, spare = spare, q
        return self._grams[q].view(dtype)

    def _product(
        self, buffers: list[int], *, polynomial: bool = False, to: torch.dtype = torch.float16
    ) -> None:
        """Multiply buffers of Gram matrices.

        The first two into the third, the fourth and fifth into the sixth.
        """
        kernels.product[(len(self._gram_tiles), len(buffers) // 3)](
            self._grams,
            self._grams.stride(0),
            sum(buffer << 3 * place for place, buffer in enumerate(buffers)),
            self._matrices,
            self._gram_tiles,
            *COEFFICIENTS,
            POLYNOMIAL=polynomial,
            TO=TYPES[to],
            **SMALL,
        )

    def _with_long_side(self, kernel: Any, *tensors: Tensor, SCALED: bool) -> None:
        for tall, tiles in (self._long_tiles if kernel is kernels.apply else self._tiles).items():
            kernel[(len(tiles),)](
                *tensors,
                self._squares,
                self._matrices,
                tiles,
                SCALED=SCALED,
                TALL=tall,
                **LONG,
            )

    # ---------------------------------------------------------------------- tables

    def _lay_out_matrices(self) -> None:
        """Tables of rows, matrices and tiles, and the memory that they point into."""
        rows = []
        matrices = []
        used = 0
        used_by_gram = 0
        first = 0
        for index, item in enumerate(self.spheres):
            length = item.weight[0].numel()
            height = len(item.weight) // item.splits
            stride = _blocks(length) * SIDE
            for part in range(item.splits):
                local = torch.arange(height)
                row = torch.full((height, 4), index)
                row[:, 1] = part * height + local
                row[:, 2] = length
                row[:, 3] = used + local * stride
                rows.append(row)
                short = min(height, length)
                long = max(height, length)
                matrices.append([short, long, stride, used, used_by_gram, first, height])
                # a row that is a matrix is its own direction
                used += stride * (1 if height == 1 else _blocks(height) * SIDE)
                used_by_gram += (_blocks(short) * SIDE) ** 2
                first += height
        self._rows = self._integers(torch.cat(rows))
        self._matrices = self._integers(torch.tensor(matrices))
        self._make_tiles(matrices)
        # bfloat16 has the range of gradients; Triton's interpreter multiplies float16 alone
        half = torch.bfloat16 if self.device.type == "cuda" else torch.float16
        scratch = torch.zeros(used, dtype=half, device=self.device)
        self._scratch = scratch, torch.zeros_like(scratch, dtype=torch.float16)
        self._grams = torch.zeros(5, used_by_gram, dtype=torch.float16, device=self.device)
        self._squares = torch.zeros(first, device=self.device)
        self._shares = torch.zeros(first, device=self.device)
        self._addresses = self._pointers([[s.weight, s.momentum] for s in self.spheres])
        count = len(self.spheres)
        self._gradients = Table((count,), torch.int64, self.device)
        self._numbers = Table((count, 2), torch.float32, self.device)
        heights = [len(s.weight) for s in self.spheres]
        self._row_launches = _runs([_kind(s) for s in self.spheres], heights)

    def _make_tiles(self, matrices: list[list[int]]) -> None:
        """Tiles of symmetric products and of products with the long side, the deepest first."""
        deepest = sorted(range(len(matrices)), key=lambda k: -matrices[k][1])
        members = [k for k in deepest if matrices[k][0] > 1]
        blocks = [(_blocks(short), _blocks(long)) for short, long, *_ in matrices]
        tall = [long == height != short for short, long, *_, height in matrices]
        lower = {k: [(k, i, j) for i in range(blocks[k][0]) for j in range(i + 1)] for k in members}
        whole = {
            k: [(k, i, j) for i in range(blocks[k][0]) for j in range(blocks[k][1])]
            for k in members
        }

        def table(tiles: dict[int, list[tuple[int, int, int]]], kinds: set[bool]) -> Tensor:
            chosen = [tile for k in members if tall[k] in kinds for tile in tiles[k]]
            return self._integers(torch.tensor(chosen).reshape(-1, 3))

        self._gram_tiles = table(lower, {False, True})
        kinds = sorted({tall[k] for k in members})
        self._tiles = {kind: table(lower, {kind}) for kind in kinds}
        self._long_tiles = {kind: table(whole, {kind}) for kind in kinds}

    def _lay_out_vectors(self) -> None:
        """Tables of the chunks of parameters that get AdamW."""
        chunks = []
        counts = []
        for index, item in enumerate(self.others):
            size = item.weight.numel()
            own = [[index, begin, size] for begin in range(0, size, CHUNK)]
            chunks += own
            counts.append(len(own))
        self._chunks = self._integers(torch.tensor(chunks))
        states = [[o.weight, o.exp_avg, o.exp_avg_sq] for o in self.others]
        self._other_addresses = self._pointers(states)
        self._other_steps = self._pointers([[o.step] for o in self.others])
        count = len(self.others)
        self._other_gradients = Table((count,), torch.int64, self.device)
        self._other_numbers = Table((count, 5), torch.float32, self.device)
        self._chunk_launches = _runs([o.parameter.dtype for o in self.others], counts)

    def _integers(self, table: Tensor) -> Tensor:
        if table.numel() and int(table.max()) >= 2**31:
            raise ValueError("the fused step takes at most 2**31 elements of hidden matrices")
        return table.to(device=self.device, dtype=torch.int32).contiguous()

    def _pointers(self, tensors: list[list[Tensor]]) -> Tensor:
        addresses = [[t.data_ptr() for t in row] for row in tensors]
        return torch.tensor(addresses, dtype=torch.int64, device=self.device)

    def _write_tables(self, factor: float) -> None:
        if self.spheres:
            self._gradients.write([self._gradient(item) for item in self.spheres])
            self._numbers.write(
                [[factor * item.group["lr"], item.group["momentum"]] for item in self.spheres]
            )
        if self.others:
            self._other_gradients.write([self._gradient(item) for item in self.others])
            self._other_numbers.write(
                [
                    [
                        factor * item.group["lr"],
                        item.group["weight_decay"],
                        *item.group["betas"],
                        item.group["eps"],
                    ]
                    for item in self.others
                ]
            )

    def _gradient(self, item: OnSphere | OffSphere) -> int:
        """The address of a gradient in the layout of its weight, 0 where there is none."""
        gradient = item.parameter.grad
        if gradient is None:
            return 0
        weight = item.weight
        if gradient.shape != weight.shape and gradient.is_contiguous():
            gradient = gradient.view(weight.shape)  # experts, one below the other
        if gradient.stride() != weight.stride() or gradient.data_ptr() % 16:
            key = id(item.parameter)
            if key not in self._copies:
                self._copies[key] = torch.empty_like(weight, dtype=gradient.dtype)
            gradient = self._copies[key].copy_(gradient.reshape(weight.shape))
        return gradient.data_ptr()


class Table:
    """Numbers on the device that the host rewrites before a step without waiting for the device."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.numbers = torch.zeros(shape, dtype=dtype, device=device)
        self._values: list[Any] = []
        self._turn = 0
        if device.type == "cuda":
            self._staged = [torch.zeros(shape, dtype=dtype, pin_memory=True) for _ in range(4)]
            self._kept = torch.zeros(shape, dtype=dtype, pin_memory=True)
            self._copied = [torch.cuda.Event() for _ in self._staged]  # type: ignore[no-untyped-call]
            self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def write(self, values: list[Any]) -> None:
        """Send the values to the device, unless it has them."""
        if values == self._values:
            return
        self._values = values
        numbers = torch.tensor(values, dtype=self.numbers.dtype)
        if not self.numbers.is_cuda:
            self.numbers.copy_(numbers)
        elif torch.cuda.is_current_stream_capturing():
            # what the caller's graph reads is written once, beside it: its replays do not pass here
            with torch.cuda.stream(self._beside):
                self.numbers.copy_(self._kept.copy_(numbers), non_blocking=True)
        else:
            self._turn = (self._turn + 1) % len(self._staged)
            self._copied[self._turn].synchronize()
            staged = self._staged[self._turn].copy_(numbers)
            self.numbers.copy_(staged, non_blocking=True)
            self._copied[self._turn].record()


def _blocks(count: int) -> int:
    return -(-count // SIDE)


def _kind(item: OnSphere) -> tuple[torch.dtype, int, int]:
    """The dtype of gradients, how many elements may be read at once, how many a program holds."""
    aligned = item.weight.data_ptr() % 16 == 0 and item.momentum.data_ptr() % 16 == 0
    length = item.weight[0].numel()
    vector = 4 if aligned and length % 4 == 0 else 1
    return item.parameter.dtype, vector, LONG_CHUNK if length > LONG_CHUNK else CHUNK


def _runs(kinds: Sequence[Any], counts: Sequence[int]) -> list[tuple[Any, int, int]]:
    """Runs of one kind: the kind, the first program and their number."""
    found: list[tuple[Any, int, int]] = []
    first = 0
    for kind, count in zip(kinds, counts, strict=True):
        if found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1], found[-1][2] + count)
        else:
            found.append((kind, first, count))
        first += count
    return found


# ---------------------------------------------------------------------- of an optimizer


def fused_steps(optimizer: Any, devices: Collection[torch.device]) -> list[FusedStep]:
    """The fused steps of an optimizer's parameters on some devices.

    Others are left to the reference.
    """
    found: dict[Any, tuple[list[OnSphere], list[OffSphere]]] = {}
    options: dict[Any, tuple[bool, int]] = {}
    for group in optimizer.param_groups:
        for entry in entries_of(group) if _is_served(group) else ():
            parameter = entry.parameter
            if (
                not parameter.requires_grad
                or is_sharded(parameter)
                or parameter.device not in devices
            ):
                continue
            weight = optimizer.weight_of(parameter).detach()
            device = parameter.device
            on, off = found.setdefault(device, ([], []))
            if group["rule"] == "adamw" and _is_dense(weight):
                state = _arranged(optimizer, parameter, "adamw", weight)
                moments = state["exp_avg"], state["exp_avg_sq"]
                off.append(OffSphere(parameter, weight, *moments, state["step"], entry.name, group))
            elif group["rule"] == "spheres" and _turns_by_row(entry, weight):
                own = group["nesterov"], group["ns_steps"]
                if options.setdefault(device, own) != own:
                    continue
                momentum = _arranged(optimizer, parameter, "spheres", weight)["momentum"]
                if len(weight) != entry.spheres:
                    weight, momentum = weight.flatten(0, 1), momentum.flatten(0, 1)
                splits = entry.layout.matrices
                on.append(OnSphere(parameter, weight, momentum, splits, entry.name, group))
    return [
        FusedStep(on, off, nesterov=options[device][0], iterations=options[device][1])
        for device, (on, off) in found.items()
        if on
    ]


def _is_served(group: Mapping[str, Any]) -> bool:
    """Whether a group has a rule that the kernels know.

    Rates that are tensors are left to the reference.
    """
    if isinstance(group["lr"], Tensor):
        return False
    spectral = group["direction"] == "spectral" and group["ns_steps"] in ITERATIONS
    return group["rule"] == "adamw" or (group["rule"] == "spheres" and spectral)


def _turns_by_row(entry: Entry, weight: Tensor) -> bool:
    """Whether spheres are rows, as they lie in memory; experts are rows of rows."""
    layout = entry.layout
    if layout.swap or entry.spheres != layout.matrices * layout.rows:
        return False
    if entry.spheres == len(weight):
        return has_dense_rows(weight)
    return weight.ndim == 3 and weight.is_contiguous() and weight.dtype == torch.float32


def _is_dense(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and torch.empty_like(weight).stride() == weight.stride()


def _arranged(optimizer: Any, parameter: Any, rule: str, weight: Tensor) -> dict[str, Tensor]:
    """The state of a parameter, its tensors laid out as the weight is."""
    state: dict[str, Tensor] = optimizer.state_of(parameter, rule)
    for name in ("momentum", "exp_avg", "exp_avg_sq"):
        if name in state and state[name].stride() != weight.stride():
            state[name] = torch.empty_like(weight).copy_(state[name])
    return state
