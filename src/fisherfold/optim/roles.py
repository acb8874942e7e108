"""What each parameter of a network is.

A hidden matrix, a head, an embedding, a recurrent weight or a vector.

Types of modules tell most of it. Which matrices are heads, and which raw parameters are matrices,
the data flow tells: after the first forward pass the autograd graph is walked once, from the
outputs of the model to its parameters. A head is a weight between whose product and an output there
is no other weight; a residual stream that ends in an output has no head. Before that, and where the
graph cannot be seen (compiled models, FSDP2), names are looked at.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fisherfold.optim.distributed import is_sharded
from fisherfold.optim.layout import Layout, layout_of

Role = Literal["hidden", "head", "embedding", "recurrent", "raw", "narrow", "zero", "vector"]
MATRICES = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.MultiheadAttention)
LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
# Children of a model (or of its children) that are heads by their names.
HEADS = {"head", "heads", "head_dist", "fc", "classifier", "lm_head", "score", "logits", "output"}
HEADS |= {"predictions", "qa_outputs", "to_logits", "visual_projection", "text_projection"}
WHY: dict[str, str] = {
    "hidden": "hidden matrix",
    "head": "head",
    "embedding": "embedding",
    "recurrent": "recurrent weight",
    "raw": "not the factor of a product",
    "narrow": "a single row or column",
    "zero": "has rows of zero, which have no direction",
    "vector": "vector",
}


@dataclass(frozen=True)
class Finding:
    """What a parameter is.

    Attributes:
        role: of the parameter.
        layout: the matrices that it consists of.
        reason: how that was found.
    """

    role: Role
    layout: Layout
    reason: str


def findings_of(model: nn.Module, flow: Mapping[int, Use] | None = None) -> dict[str, Finding]:
    """What every parameter is, by name; ``flow`` is what ``uses_of`` has seen."""
    found: dict[str, Finding] = {}
    lookups = {id(m.weight) for m in model.modules() if isinstance(m, LOOKUPS)}
    owners = {
        id(p): module
        for module in reversed([*model.modules()])
        for p in module.parameters(recurse=False)
    }
    for name, p in model.named_parameters():
        layout = layout_of(p, owners[id(p)], name)
        use = flow.get(id(p)) if flow else None
        if use is not None and use.swapped and p.ndim in (2, 3) and not layout.swap:
            rows = p.shape[-1]
            layout = Layout(len(p) if p.ndim == 3 else 1, rows, p.ndim - 1)
        role = _role(p, owners[id(p)], id(p) in lookups, use, layout)
        found[name] = Finding(role, layout, WHY[role] + (", by the data flow" if use else ""))
    hidden = [name for name, finding in found.items() if finding.role == "hidden"]
    if flow:
        parameters = dict(model.named_parameters())
        uses = {name: flow.get(id(parameters[name])) for name in hidden}
        heads = [name for name, use in uses.items() if use is not None and use.ends]
        reason = "head: no other weight follows"
    else:
        heads = _named_heads(hidden)
        modules = [name.split(".")[:2] for name, _ in model.named_modules()]
        if not heads and not any(HEADS & set(parts) for parts in modules):
            heads = hidden[-1:]
        reason = "head, by its name or place"
    for name in heads:
        found[name] = Finding("head", found[name].layout, reason)
    return found


def _role(p: Tensor, module: nn.Module, is_lookup: bool, use: Use | None, layout: Layout) -> Role:
    if p.ndim < 2 or not p.numel():
        return "vector"
    if is_lookup:
        return "embedding"
    if isinstance(module, RECURRENT):
        return "recurrent"
    known = isinstance(module, MATRICES) or type(module).__name__ == "Conv1D"
    if use is not None and not use.product and not known:
        return "raw"
    if use is None and not known and (p.ndim != 3 or min(p.shape) < 2):
        return "raw"
    columns = p.numel() // (layout.matrices * layout.rows)
    if columns == 1 or layout.matrices * layout.rows == 1:
        return "narrow"
    return "hidden" if _directed(p, layout) else "zero"


def _directed(p: Tensor, layout: Layout) -> bool:
    """Whether every row has a direction."""
    if p.is_meta or is_sharded(p):
        return True
    largest = layout.split(p.detach()).abs().amax(-1)
    return bool(((largest > 0) & largest.isfinite()).all())


def _named_heads(hidden: list[str]) -> list[str]:
    """The last matrices of children with the name of a head."""
    last: dict[str, str] = {}
    for name in hidden:
        parts = name.split(".")
        depth = next((i for i, part in enumerate(parts[:2]) if part in HEADS), None)
        if depth is not None:
            last[".".join(parts[: depth + 1])] = name
    return [*last.values()]


# ---------------------------------------------------------------------- data flow

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "grouped", "mv", "dot")
LINKS: tuple[str, ...] = (
    "t",
    "transpose",
    "permute",
    "view",
    "unsafeview",
    "reshapealias",
    "tocopy",
    "alias",
)
LINKS += ("expand", "clone", "select", "slice", "split", "unbind", "chunk", "squeeze", "unsqueeze")
LINKS += ("accumulategrad",)
# Nodes that hide a part of the graph.
OPAQUE = ("compiledfunction", "checkpointfunction")


@dataclass
class Use:
    """How the graph uses a parameter.

    Attributes:
        product: as a factor of a product or convolution, and never otherwise.
        swapped: with the outputs in its last axis, as in ``x @ weight``.
        ends: no other weight follows on the way to an output.
    """

    product: bool
    swapped: bool
    ends: bool = False


def uses_of(outputs: Iterable[Any], parameters: Iterable[Tensor]) -> dict[int, Use]:
    """How the graph that ends in these nodes uses parameters, by their ``id``."""
    graph = _Graph(outputs, {id(p): p.ndim for p in parameters})
    found: dict[int, Use] = {}
    if any(_kind(node).startswith(OPAQUE) for node in graph.inputs):
        return found
    for key, (node, argument, turns) in graph.consumers():
        kind = _kind(node)
        # what is multiplied by a weight, such as learned queries, is an input
        product = _is_product(kind) and not graph.weights(node) - {key}
        mine = found.setdefault(key, Use(product, False))
        mine.product &= product
        second = argument == _factors(kind).stop - 1
        mine.swapped |= turns in {0, 1} and second != (turns == 1) and "mm" in kind
    for key in graph.ends():
        if key in found:
            found[key].ends = True
    return found


def _kind(node: Any) -> str:
    return str(node.name()).rsplit("::", 1)[-1].split("Backward")[0].lower()


def _is_product(kind: str) -> bool:
    """Whether a node multiplies by a weight, as far as its name tells; functions of users do."""
    return kind.startswith(PRODUCTS) or kind.endswith("function")


def _factors(kind: str) -> slice:
    """Which arguments of a product are its factors."""
    return slice(1, 3) if kind in {"addmm", "baddbmm"} else slice(0, 2)


class _Graph:
    """The autograd graph behind the outputs of a model."""

    def __init__(self, outputs: Iterable[Any], known: dict[int, int]) -> None:
        self.known = known
        self.inputs: dict[Any, list[Any]] = {}
        self.users: dict[Any, list[tuple[Any, int]]] = {}
        roots = dict.fromkeys(outputs)
        waiting = list(roots)
        while waiting:
            node = waiting.pop()
            if node in self.inputs:
                continue
            self.inputs[node] = [n for n, _ in node.next_functions]
            for index, source in enumerate(self.inputs[node]):
                if source is not None:
                    self.users.setdefault(source, []).append((node, index))
                    waiting.append(source)
        # an output of which another is made, such as hidden states beside logits, is no end
        self.roots = [node for node in roots if node not in self.users]

    def leaf(self, node: Any) -> int | None:
        """The parameter of a node that accumulates its gradient."""
        key = id(getattr(node, "variable", None))
        return key if key in self.known else None

    def consumers(self) -> Iterable[tuple[int, tuple[Any, int, int]]]:
        """Parameters with the nodes that use them, behind views.

        (node, argument, transpositions).
        """
        for node in self.inputs:
            key = self.leaf(node)
            waiting = [(node, 0)] if key is not None else []
            while waiting and key is not None:
                here, turns = waiting.pop()
                for user, argument in self.users.get(here, []):
                    kind = _kind(user)
                    if kind in LINKS and argument == 0:
                        # einsum permutes in its own ways: rows are then taken as they lie
                        turned = turns ^ 1 if kind in {"t", "transpose"} else turns
                        waiting.append((user, 2 if kind == "permute" else turned))
                    else:
                        yield key, (user, argument, turns)

    def weights(self, node: Any) -> set[int]:
        """The matrices that are factors of a node."""
        found: set[int] = set()
        for source in self.inputs[node]:
            while source is not None and _kind(source) in LINKS:
                key = self.leaf(source)
                if key is not None and self.known[key] > 1:
                    found.add(key)
                source = next(iter(self.inputs[source]), None)
        return found

    def ends(self) -> set[int]:
        """Weights after whose products there is no other weight."""
        found: set[int] = set()
        waiting, seen = list(self.roots), set(self.roots)
        while waiting:
            node = waiting.pop()
            kind = _kind(node)
            sources = [n for n in self.inputs[node] if n is not None]
            if _is_product(kind):
                weights = self.weights(node)
                found |= weights
                # a factor that is constant is a frozen weight
                if weights or None in self.inputs[node][_factors(kind)]:
                    continue
            elif kind.startswith("add") and len(sources) == 2 and self.is_residual(*sources):
                continue
            for source in sources:
                if source not in seen:
                    seen.add(source)
                    waiting.append(source)
        return found

    def is_residual(self, a: Any, b: Any) -> bool:
        """Whether one of two summands is made of the other."""
        return self.reaches(a, b) or self.reaches(b, a)

    def reaches(self, start: Any, goal: Any) -> bool:
        """Whether a node is made of another."""
        if _kind(goal) == "accumulategrad":
            return False
        waiting, seen = [start], {start}
        while waiting:
            for source in self.inputs[waiting.pop()]:
                if source is goal:
                    return True
                if source is not None and source not in seen:
                    seen.add(source)
                    waiting.append(source)
        return False


class FlowHooks:
    """Hooks that keep the ends of the graphs of the first forward passes.

    Until they are asked for.
    """

    KEEP = 64

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.depth = 0
        self.outputs: list[Any] = []
        self.handles = []
        mine = weakref.ref(self)
        for module in model.modules():
            self.handles += [
                module.register_forward_pre_hook(_FlowHook(mine, enters=True)),
                module.register_forward_hook(_FlowHook(mine, enters=False), always_call=True),
            ]

    def see(self, module: nn.Module, output: Any) -> None:
        """Keep what the outermost of the modules returns."""
        if self.depth == 0 and module.training and torch.is_grad_enabled():
            leaves = _tensors(output)
            self.outputs = [*self.outputs, *(t.grad_fn for t in leaves if t.grad_fn)][-self.KEEP :]

    def finish(self) -> dict[int, Use]:
        """Remove the hooks and walk the graph."""
        for handle in self.handles:
            handle.remove()
        outputs, self.outputs = self.outputs, []
        return uses_of(outputs, self.model.parameters()) if outputs else {}


class _FlowHook:
    """Before or after a forward pass; copies of a model have hooks that do nothing."""

    def __init__(self, owner: Any, *, enters: bool) -> None:
        self.owner = owner
        self.enters = enters

    def __deepcopy__(self, memo: dict[int, Any]) -> _FlowHook:
        return _FlowHook(_nobody, enters=self.enters)

    def __reduce__(self) -> tuple[Any, ...]:
        return _FlowHook._idle, (self.enters,)

    @staticmethod
    def _idle(enters: bool) -> _FlowHook:
        return _FlowHook(_nobody, enters=enters)

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        owner = None if torch.compiler.is_compiling() else self.owner()
        if owner is None:
            return
        owner.depth = max(owner.depth + (1 if self.enters else -1), 0)
        if not self.enters:
            owner.see(module, output)


def _nobody() -> None:
    return None


def _tensors(output: Any) -> list[Tensor]:
    """The tensors in what a module returns."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    elif hasattr(output, "__dataclass_fields__"):
        output = [getattr(output, key, None) for key in output.__dataclass_fields__]
    if not isinstance(output, list | tuple):
        return []
    return [t for each in output for t in _tensors(each)]
