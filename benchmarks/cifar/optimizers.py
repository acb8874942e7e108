"""Optimizers by name with their schedules.

Ours, the paper's (``paper-mkfac``) and those that they are compared with.

``lr`` is the rate of the optimizer; for those on spheres the angle per step, with ``rest_lr`` for
the other parameters. A schedule is a factor on all rates of a group by the share of the run that is
done.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fisherfold.optim import KFAC, MKFAC, SGDG, SphereOptimizer
from fisherfold.optim.spectral import orthogonalise

# manifold rate, its decay, damping and its decay, as the paper gives them
PAPER = {
    ("cifar10", "wrn"): (0.25, 0.2, 1.0, 0.8),
    ("cifar10", "vgg"): (0.25, 0.2, 2.0, 0.5),
    ("cifar100", "wrn"): (0.30, 0.15, 1.0, 0.8),
    ("cifar100", "vgg"): (0.15, 0.2, 0.5, 0.5),
}
MILESTONES = (0.3, 0.6, 0.9)


class FlatMuon(torch.optim.Optimizer):
    """Muon in airbench's form.

    Convolutions flattened to matrices, weights scaled to a fixed norm before each step.
    """

    def __init__(self, params: Any, lr: float, momentum: float = 0.6) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                update = newton_schulz((p.grad + group["momentum"] * buffer).flatten(1))
                p.mul_(len(p) ** 0.5 / p.norm()).add_(update.view_as(p), alpha=-group["lr"])


def newton_schulz(matrix: Tensor, steps: int = 3) -> Tensor:
    x = matrix.bfloat16() / (matrix.norm() + 1e-7)
    x = x.T if len(matrix) > matrix.shape[1] else x
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.T if len(matrix) > matrix.shape[1] else x).to(matrix)


class Soap(torch.optim.Optimizer):
    """SOAP (arXiv 2409.11321).

    Adam in the eigenbases of running means of G Gᵀ and Gᵀ G; plain Adam for vectors.

    Tensors are flattened to matrices; bases are renewed by one step of the power method every
    ``every`` steps; sides above ``LARGEST`` keep their own axes; the first step only begins the
    means, as in its authors' code.
    """

    LARGEST = 2048

    def __init__(
        self, params: Any, lr: float, weight_decay: float = 0.0, beta: float = 0.95, every: int = 10
    ) -> None:
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "beta": beta, "every": every}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, self.state[p], group["beta"], group)

    def _update(self, p: Tensor, state: dict[str, Any], beta: float, group: dict[str, Any]) -> None:
        g = p.grad.float().flatten(1) if p.ndim > 1 else p.grad.float()[:, None]
        if not state:
            state.update(step=0, mean=torch.zeros_like(g), square=torch.zeros_like(g))
            if p.ndim > 1:
                sides = [
                    g if length <= self.LARGEST else None
                    for g, length in ((g, len(g)), (g.T, g.shape[1]))
                ]
                state["means"] = [
                    None if side is None else (1 - beta) * side @ side.T for side in sides
                ]
                state["bases"] = [
                    None if m is None else torch.linalg.eigh(m)[1].flip(1) for m in state["means"]
                ]
                return
        state["step"] += 1
        left, right = state.get("bases", (None, None))
        state["mean"].lerp_(g, 1 - beta)
        state["square"].mul_(beta).addcmul_(*[_turned(g, left, right)] * 2, value=1 - beta)
        done = 1 - beta ** state["step"]
        update = (
            _turned(state["mean"], left, right) / done / ((state["square"] / done).sqrt() + 1e-8)
        )
        update = _turned(update, *(None if basis is None else basis.T for basis in (left, right)))
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.view_as(p), alpha=group["lr"])
        for mean, side in zip(state.get("means", ()), (g, g.T), strict=False):
            if mean is not None:
                mean.lerp_(side @ side.T, 1 - beta)
        if "means" in state and state["step"] % group["every"] == 0:
            self._renew(state)

    @staticmethod
    def _renew(state: dict[str, Any]) -> None:
        for side, (mean, basis) in enumerate(zip(state["means"], state["bases"], strict=True)):
            if mean is None:
                continue
            order = (basis * (mean @ basis)).sum(0).argsort(descending=True)
            state["bases"][side] = torch.linalg.qr(mean @ basis[:, order])[0]
            state["square"] = state["square"].index_select(side, order)


def _turned(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    matrix = matrix if left is None else left.T @ matrix
    return matrix if right is None else matrix @ right


class Several(torch.optim.Optimizer):
    """Two optimizers as one, for loops that know one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        self.defaults = {}
        self.state = {}
        self.param_groups = list(itertools.chain.from_iterable(part.param_groups for part in parts))

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, own in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(own)


class Muon(torch.optim.Optimizer):
    """Muon in Moonlight's form: orthogonalised steps as large as those of AdamW."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            shapes: dict[Any, list[Tensor]] = {}
            for p in group["params"]:
                shapes.setdefault(p.shape, []).append(p)
            for shape, members in shapes.items():
                updates = [self._update(p, group["momentum"]) for p in members]
                size = 0.2 * max(shape) ** 0.5
                for p, sign in zip(members, orthogonalise(torch.stack(updates)), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(size * group["lr"] * sign)

    def _update(self, p: Tensor, momentum: float) -> Tensor:
        buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
        buffer.mul_(momentum).add_(p.grad)
        return p.grad + momentum * buffer


def _muon(model: nn.Module, given: dict[str, Any]) -> torch.optim.Optimizer:
    lr = given["lr"]
    if hidden := [p for n, p in model.named_parameters() if "blocks" in n and p.ndim == 2]:
        chosen = {id(p) for p in hidden}
        others = [p for p in model.parameters() if id(p) not in chosen]
        decay = given["weight_decay"]
        rest = torch.optim.AdamW(others, lr, betas=(0.9, 0.99), weight_decay=decay)
        return Several(Muon(hidden, lr, decay=decay), rest)
    filters = [p for m in model.modules() if isinstance(m, nn.Conv2d) for p in m.parameters()]
    chosen = {id(p) for p in filters}
    others = [p for p in model.parameters() if id(p) not in chosen]
    rest = torch.optim.SGD(
        others, given["rest_lr"], momentum=0.85, nesterov=True, weight_decay=given["weight_decay"]
    )
    return Several(FlatMuon(filters, lr), rest)


def _peer(name: str) -> Callable[[nn.Module, dict[str, Any]], torch.optim.Optimizer]:
    def make(model: nn.Module, given: dict[str, Any]) -> torch.optim.Optimizer:
        import pytorch_optimizer

        cls = getattr(pytorch_optimizer, name)
        return cls(model.parameters(), lr=given["lr"], weight_decay=given["weight_decay"])

    return make


def build(
    name: str, model: nn.Module, example: Tensor, task: tuple[str, str], given: dict[str, Any]
) -> Any:
    """The optimizer ``name`` for a model; ``task`` is (data set, first letters of the network)."""
    lr = given["lr"]
    decay = given["weight_decay"]
    parameters = model.parameters
    spheres = {
        "rest_lr": given["rest_lr"],
        "rest": "sgd",
        "weight_decay": decay,
    }
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(
            parameters(), lr, momentum=0.9, nesterov=True, weight_decay=decay
        ),
        "adamw": lambda: torch.optim.AdamW(parameters(), lr, weight_decay=decay),
        "muon": lambda: _muon(model, given),
        "soap": lambda: Soap(parameters(), lr, decay),
        "sgdp": lambda: _peer("SGDP")(model, given),
        "adamp": lambda: _peer("AdamP")(model, given),
        "drop-in": lambda: SphereOptimizer(model, lr, total_steps=given.get("steps")),
        "constant": lambda: SphereOptimizer(model, lr, average=True),
        "spectral": lambda: SphereOptimizer(model, lr, direction="spectral", **spheres),
        "gradient": lambda: SphereOptimizer(model, lr, direction="gradient", **spheres),
        "natural": lambda: SphereOptimizer(
            model, lr, direction="natural", every=given["every"], **spheres
        ),
        "kfac": lambda: KFAC(
            model, lr, weight_decay=decay, damping=given["damping"], every=given["every"]
        ),
        "mkfac": lambda: MKFAC(
            model,
            given["rest_lr"],
            lr,
            weight_decay=decay,
            damping=given["damping"],
            every=given["every"],
            example_input=example,
        ),
        "paper-mkfac": lambda: _paper(model, example, task),
        "paper-sgdg": lambda: _paper(model, example, task, curved=False),
        "sgdg": lambda: SGDG(model, 0.05, lr, weight_decay=decay, example_input=example),
    }
    if name not in makers:
        raise ValueError(f"optimizer must be one of {', '.join(makers)}, got {name!r}")
    return makers[name]()


def _paper(
    model: nn.Module, example: Tensor, task: tuple[str, str], *, curved: bool = True
) -> MKFAC | SGDG:
    rate, _, damping, _ = PAPER[task]
    # directions are normalised by the damping, so the paper's rate is divided by it
    if not curved:
        return SGDG(model, 0.05, rate / damping, weight_decay=5e-4, example_input=example)
    return MKFAC(
        model,
        0.05,
        rate / damping,
        weight_decay=5e-4,
        damping=damping,
        every=0,
        example_input=example,
    )


def paper_stage(optimizer: torch.optim.Optimizer, task: tuple[str, str], stage: int) -> None:
    """Rates and damping of the paper from the given milestone on."""
    rate, rate_decay, damping, damping_decay = PAPER[task]
    falling = damping * damping_decay**stage
    for group in optimizer.param_groups:
        group["damping"] = falling
        group["lr"] = (
            rate * rate_decay**stage / falling if group["rule"] == "spheres" else 0.05 * 0.1**stage
        )


# those whose rates fall inside, or not at all
OWN_RATES = ("drop-in", "constant")


def factor(done: float, *, warm: float = 0.1) -> float:
    """Linear warm-up, then linear decay to zero."""
    return done / warm if done < warm else (1 - done) / (1 - warm)
