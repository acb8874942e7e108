"""Which weights of a network are scale invariant? Ask it, instead of guessing from names.

    python examples/scale_invariance.py scale_invariance.png

A small residual network with a batch norm, a group norm, a weight norm and a plain head. A weight
whose gradient is orthogonal to it lives on spheres; ``find_scale_invariant`` measures that angle.
"""

from __future__ import annotations

import sys

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from fisherfold import find_scale_invariant


class Residual(nn.Module):
    """Two convolutions with batch norm and a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.group_norm = nn.GroupNorm(2, 8)
        self.hidden = weight_norm(nn.Linear(8, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        x = torch.relu(self.stem_norm(self.stem(x)))
        x = x + torch.relu(self.norm(self.conv(x)))
        x = torch.relu(self.group_norm(self.grouped(x)))
        return self.head(torch.tanh(self.hidden(x.mean(dim=(2, 3)))))


def main() -> Figure:
    """Probe the network, print the verdicts and draw what was measured."""
    torch.manual_seed(0)
    findings = find_scale_invariant(Residual(), torch.randn(16, 3, 8, 8))
    for name, found in findings.items():
        print(f"{name:40} {found.kind:7} {found.spheres:3d} spheres  {found.reason}")

    weights = {
        name: found for name, found in findings.items() if found.statistic == found.statistic
    }
    colours = {"row": "#0072b2", "group": "#009e73", "tensor": "#cc79a7", "none": "#d55e00"}
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    panel = figure.subplots()
    for place, found in enumerate(weights.values()):
        panel.barh(place, max(found.statistic, 1e-17), left=1e-17, color=colours[found.kind])
    panel.set_yticks(range(len(weights)), weights)
    panel.invert_yaxis()
    panel.axvline(0.02, color="grey", ls="--")
    panel.set(
        xscale="log",
        xlim=(1e-17, 30),
        xlabel="|cos(gradient, weight)| √dim, the largest (grey: threshold)",
    )
    for kind, colour in colours.items():
        if kind in {found.kind for found in weights.values()}:
            panel.barh(
                0,
                0,
                color=colour,
                label="not invariant" if kind == "none" else f"invariant by {kind}",
            )
    panel.legend(loc="upper center", bbox_to_anchor=(0.4, 1.12), ncols=4, frameon=False)
    return figure


if __name__ == "__main__":
    main().savefig(sys.argv[1] if len(sys.argv) > 1 else "scale_invariance.png", dpi=100)
