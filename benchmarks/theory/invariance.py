r"""Part 5: behind batch normalisation <∇w_i, w_i> = 0 for every row, and RFIM = FIM.

    Ψ(c w_i) = Ψ(w_i), c > 0   ⇒   <∇_{w_i} Ψ, w_i> = 0   ⇒   grad Ψ = ∇Ψ  and  P F P = F

It is an identity of exact objects: of the gradient of every sample's loss with the batch statistics
differentiated through. Hooks, as all K-FAC codes use them, see g_n a_nᵀ with g_n the derivative of
the summed loss in the layer's output of sample n; in train mode the samples are coupled by the
statistics, and these are not the gradients of single losses: only their sum is right.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.theory.pictures import draw_invariance
from benchmarks.theory.report import Finding, Part, Row, Settings, holds_if, pick

BATCH = 32
INPUTS = 10
HIDDEN = 12
CLASSES = 4


class Network(nn.Module):
    """Linear, a normalisation, ReLU, linear."""

    def __init__(self, normalisation: str) -> None:
        super().__init__()
        self.normalisation = normalisation
        self.first = nn.Linear(INPUTS, HIDDEN, bias=False, dtype=torch.float64)
        self.last = nn.Linear(HIDDEN, CLASSES, dtype=torch.float64)

    def normalised(self, s: Tensor) -> Tensor:
        """The normalised outputs of the first layer."""
        if self.normalisation == "layer":
            return functional.layer_norm(s, (HIDDEN,), eps=0.0)
        if self.normalisation == "none":
            return s
        centred = s - s.mean(dim=0)
        variance = centred.square().mean(dim=0)
        return centred / (variance if self.normalisation == "variance" else variance.sqrt())

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch."""
        return self.last(torch.relu(self.normalised(self.first(x))))


def make(normalisation: str, *, seed: int) -> tuple[Network, Tensor, Tensor]:
    """A network with unit rows in its first layer, and a batch."""
    generator = torch.Generator().manual_seed(seed)
    network = Network(normalisation)
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
        network.first.weight.copy_(functional.normalize(network.first.weight, dim=1))
    x = torch.randn(BATCH, INPUTS, generator=generator, dtype=torch.float64) + 0.5
    y = torch.randint(CLASSES, (BATCH,), generator=generator)
    return network, x, y


def true_gradients(network: Network, x: Tensor, y: Tensor) -> Tensor:
    """Gradients of every sample's loss, batch statistics differentiated through."""
    rest = {name: p.detach() for name, p in network.named_parameters() if name != "first.weight"}

    def losses(weight: Tensor) -> Tensor:
        logits = torch.func.functional_call(network, {**rest, "first.weight": weight}, (x,))
        return functional.cross_entropy(logits, y, reduction="none")

    return torch.func.jacrev(losses)(network.first.weight.detach())


def hook_gradients(network: Network, x: Tensor, y: Tensor) -> Tensor:
    """What hooks on the first layer see.

    The output's gradient times the input, sample by sample.
    """
    seen: dict[str, Tensor] = {}

    def hook(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        seen["input"] = arguments[0]
        seen["output"] = output

    handle = network.first.register_forward_hook(hook)
    loss = functional.cross_entropy(network(x), y, reduction="sum")
    handle.remove()
    (gradient,) = torch.autograd.grad(loss, seen["output"])
    return torch.einsum("ni,nj->nij", gradient, seen["input"])


def radial_share(gradients: Tensor, weight: Tensor) -> float:
    """The share of the squared length of per-sample gradients along the rows of the weight."""
    along = (gradients * weight).sum(dim=-1)
    return float(along.square().sum() / gradients.square().sum())


def projected_fisher_change(gradients: Tensor, weight: Tensor) -> float:
    """‖P F P - F‖/‖F‖, F the second moment of the gradients, P the spheres' projector."""
    tangent = gradients - (gradients * weight).sum(dim=-1, keepdim=True) * weight
    full, projected = (g.flatten(1).T @ g.flatten(1) for g in (gradients, tangent))
    return float((full - projected).norm() / full.norm())


def measure(settings: Settings) -> list[Row]:
    """True and hook gradients under every normalisation."""
    rows = []
    for kind, seed in itertools.product(
        ("batch", "variance", "layer", "none"), range(settings.seeds)
    ):
        network, x, y = make(kind, seed=seed)
        weight = network.first.weight.detach()
        true = true_gradients(network, x, y)
        hooks = hook_gradients(network, x, y)
        cosines = functional.cosine_similarity(true.flatten(1), hooks.flatten(1), dim=1)
        whole = (true * weight).sum(dim=(1, 2)) / weight.norm() / true.flatten(1).norm(dim=1)
        rows.append(
            {
                "normalisation": kind,
                "seed": seed,
                "sum_difference": float((true.sum(0) - hooks.sum(0)).norm() / true.sum(0).norm()),
                "radial_true": radial_share(true, weight),
                "radial_hooks": radial_share(hooks, weight),
                "fisher_true": projected_fisher_change(true, weight),
                "fisher_hooks": projected_fisher_change(hooks, weight),
                "whole_true": float(whole.abs().max()),
                "cosines": sorted(cosines.tolist()),
                **_scaling(network, x, y),
            }
        )
    return rows


def _scaling(network: Network, x: Tensor, y: Tensor) -> dict[str, float]:
    """The relative change of the loss when one row is scaled by 2, and when its sign is turned."""
    weight = network.first.weight
    original = weight.detach().clone()
    changes = {}
    with torch.no_grad():
        loss = functional.cross_entropy(network(x), y)
        for name, factor in (("scaled", 2.0), ("negated", -1.0)):
            weight[0] = factor * original[0]
            changes[name] = abs(float(functional.cross_entropy(network(x), y) / loss - 1))
            weight.copy_(original)
    return changes


def findings(rows: list[Row]) -> list[Finding]:
    """What the gradients say about the row identity."""

    def each(normalisation: str, column: str) -> list[float]:
        return [r[column] for r in pick(rows, normalisation=normalisation)]

    def zero(name: str, predicted: float | str, value: float, note: str) -> Finding:
        return Finding(name, predicted, value, holds_if(value < 1e-12), note)

    return [
        zero(
            "batch norm: <∇w_i, w_i> = 0, every sample, exact gradients",
            0.0,
            math.sqrt(max(each("batch", "radial_true"))),
            "radial part over the length, the worst seed; statistics differentiated through, "
            "float64",
        ),
        zero(
            "batch norm: <∇w_i, w_i> = 0, per-sample gradients from hooks in train mode",
            0.0,
            math.sqrt(min(each("batch", "radial_hooks"))),
            "radial part over the length, the least seed. Their sum is the exact batch gradient "
            f"(to {max(each('batch', 'sum_difference')):.0e}), one by one they are not",
        ),
        zero(
            "batch norm: RFIM = FIM, exact",
            0.0,
            max(each("batch", "fisher_true")),
            "‖PFP - F‖/‖F‖, F the second moment of exact gradients",
        ),
        zero(
            "batch norm: RFIM = FIM, as hook-based K-FAC computes it",
            0.0,
            max(each("batch", "fisher_hooks")),
            "‖PFP - F‖/‖F‖ of the hook rows, the worst seed: project after preconditioning",
        ),
        zero(
            "batch norm as printed, divided by Var",
            "Ψ(2w) = Ψ(w)",
            max(each("variance", "scaled")),
            "relative change of the loss when one row is doubled; dividing by the standard "
            f"deviation it is {max(each('batch', 'scaled')):.0e}",
        ),
        zero(
            "batch norm: Ψ(cw) = Ψ(w) for all c ≠ 0",
            "Ψ(-w) = Ψ(w)",
            max(each("batch", "negated")),
            "relative change of the loss: the sign is no invariance of ReLU after batch norm, so "
            "rows live on spheres, not on Gr(1, n); for c > 0 it is one, which is what the "
            "identity needs",
        ),
        zero(
            "layer norm: <∇W, W> = 0 for the whole weight, not by rows",
            0.0,
            max(each("layer", "whole_true")),
            "cosine with W, the worst sample; by rows the radial share is "
            f"{max(each('layer', 'radial_true')):.2f}",
        ),
    ]


def part(settings: Settings) -> Part:
    """Run this part."""
    rows = measure(settings)
    sentence = (
        "With batch statistics differentiated through, every sample's gradient is tangent to "
        "rounding and RFIM = FIM. The rows that hooks collect in train mode are not: only their "
        "sum is right, so what K-FAC codes compute is another matrix with a radial part. The "
        "invariance needs the standard deviation where the text prints the variance, and holds for "
        "c > 0 only."
    )
    return Part(
        "invariance", "Normalised rows", sentence, findings(rows), rows, draw_invariance(rows)
    )
