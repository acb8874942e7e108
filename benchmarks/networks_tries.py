# ruff: noqa
"""One honest try each of four ideas for steps on spheres, against spectral angles (throwaway: deleted with its verdict).

    FISHERFOLD_DATA=data OMP_NUM_THREADS=1 python benchmarks/networks_tries.py

The setting of networks.py (cnn, 5 epochs): three rates each on one seed, the best on four fresh, paired seeds; only
validation images. A and G are the Kronecker factors at unit norm, collected every ten steps, D the unit-angle direction.

    soap        Adam in the eigenbases of running means of M Mᵀ and Mᵀ M, one angle per row
    kl          α = min(0.2, lr / √q) per weight, q = tr(G D A Dᵀ) at collections, D spectral (KL of a step: ½ lr²)
    kl-share    α = lr q^-½ / mean of q^-½ over weights: only how angles are shared
    noise       α = lr (1 + (tr A tr G - ‖M‖²) / (N ‖M‖²))^-½, M the mean gradient of the momentum, N = 19 batches
    noise-share the same, divided by its mean over weights
    white-p     (A ⊗ G)^-p applied to the momentum, one angle per row
    white-p-ns  G^-p msign(G^-p M A^-p) A^-p
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import networks

from fisherfold.optim import SphereOptimizer, spheres
from fisherfold.optim.directions.spectral import orthogonalise


def power(matrix, p, damping=0.1):
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * (values.clamp_min(0) / values.mean() + damping) ** p) @ vectors.T


class Try(SphereOptimizer):
    def __init__(self, model, lr, x, kind, p=0.25):
        super().__init__(model, lr, direction="natural", example_input=x)
        self.kind, self.p = kind, p
        self.curvature._invert = lambda state, name, optimizer: None
        if kind == "soap":
            self.curvature.every = 0

    def _on_spheres(self, group, entries, weights):
        mu, directions, shares = group["momentum"], [], []
        for e, weight in zip(entries, weights, strict=True):
            p, state = e.parameter, self._state(e.parameter, "sgd")
            w = weight.flatten(1)
            g = p.grad.flatten(1) * spheres.norms(w)
            buffer = state["momentum"].view_as(g).mul_(mu).add_(g)
            m = g + mu * buffer
            share = 1.0
            if self.kind == "soap":
                d = self.soap(state, g, m)
            elif self.kind.startswith("white"):
                d = self.white(state, m)
            else:
                d = spheres.tangent(w, orthogonalise(m))
                d = d / spheres.norms(d).clamp_min(1e-30)
                share = self.share(state, d, (1 - mu) * buffer)
            directions.append(d)
            shares.append(share)
        if "share" in self.kind:
            mean = statistics.mean(shares)
            shares = [s / mean for s in shares]
        for weight, d, share in zip(weights, directions, shares, strict=True):
            w = weight.flatten(1)
            angle = group["lr"] * share
            if self.kind == "kl":
                angle = min(angle, 0.2)
            weight.copy_(spheres.rotate(w, d, angle, by_angle=True).view_as(weight))

    def share(self, state, d, mean):
        if "A" not in state:
            return 1.0 if self.kind != "kl" else 4.0
        a, g = state["A"], state["G"]
        if self.kind.startswith("kl"):
            if self.param_groups[0]["steps"] % 10 == 0 or "q" not in state:
                state["q"] = ((g @ d) * (d @ a)).sum()
            return float(state["q"]) ** -0.5
        squared = float(mean.square().sum())
        return (1 + max(float(a.trace() * g.trace()) - squared, 0.0) / (64 * 19 * squared)) ** -0.5

    def white(self, state, m):
        if "A" not in state:
            return orthogonalise(m) if self.kind.endswith("ns") else m
        count = int(state["collections"])
        if "P" not in state or (state.get("at") != count and (count < 20 and count & (count - 1) == 0 or count % 5 == 0)):
            state["P"], state["Q"], state["at"] = power(state["A"], -self.p), power(state["G"], -self.p), count
        d = state["Q"] @ m @ state["P"]
        return state["Q"] @ orthogonalise(d) @ state["P"] if self.kind.endswith("ns") else d

    def soap(self, state, g, m, beta=0.95):
        steps = self.param_groups[0]["steps"]
        if "L" not in state:
            state["L"], state["R"] = g @ g.T, g.T @ g
            state["V"] = torch.zeros_like(g)
        state["L"].lerp_(g @ g.T, 1 - beta)
        state["R"].lerp_(g.T @ g, 1 - beta)
        if "QL" not in state:
            state["QL"], state["QR"] = torch.linalg.eigh(state["L"])[1], torch.linalg.eigh(state["R"])[1]
        elif steps % 10 == 0:
            state["QL"] = torch.linalg.qr(state["L"] @ state["QL"])[0]
            state["QR"] = torch.linalg.qr(state["R"] @ state["QR"])[0]
        ql, qr = state["QL"], state["QR"]
        state["V"].lerp_((ql.T @ g @ qr).square(), 1 - beta)
        v = state["V"] / (1 - beta ** (steps + 1))
        return ql @ ((ql.T @ m @ qr) / (v.sqrt() + 1e-8 * v.max().sqrt() + 1e-30)) @ qr.T


ANGLES = (0.02, 0.04, 0.08)
TRIES = {
    "spectral": (networks.spheres(), ANGLES),
    "soap": (lambda m, lr, x: Try(m, lr, x, "soap"), ANGLES),
    "kl": (lambda m, lr, x: Try(m, lr, x, "kl"), (0.005, 0.01, 0.02)),
    "kl-share": (lambda m, lr, x: Try(m, lr, x, "kl-share"), ANGLES),
    "noise": (lambda m, lr, x: Try(m, lr, x, "noise"), (0.03, 0.06, 0.12)),
    "noise-share": (lambda m, lr, x: Try(m, lr, x, "noise-share"), ANGLES),
    "white-1/8": (lambda m, lr, x: Try(m, lr, x, "white", 0.125), ANGLES),
    "white-1/4": (lambda m, lr, x: Try(m, lr, x, "white", 0.25), ANGLES),
    "white-1/8-ns": (lambda m, lr, x: Try(m, lr, x, "white-ns", 0.125), ANGLES),
    "white-1/4-ns": (lambda m, lr, x: Try(m, lr, x, "white-ns", 0.25), ANGLES),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = networks.images()
    base = None
    for name, (make, rates) in TRIES.items():
        if given.only and name not in given.only.split(","):
            continue
        def run(lr, seed):
            curve, seconds = networks.train("cnn", make, lr, seed, given.epochs, data, "validation")
            return curve[-1], seconds[-1]
        began = time.process_time()
        trials = {lr: run(lr, 100)[0] for lr in rates}
        best = max(trials, key=trials.get)
        runs = [run(best, seed) for seed in range(given.seeds)]
        last = [a for a, _ in runs]
        base = base or last
        gaps = [a - b for a, b in zip(last, base)]
        tried = ", ".join(f"{lr:g}: {v:.1f}" for lr, v in trials.items())
        spread = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0
        print(f"{name:13} {statistics.mean(last):5.2f} ± {statistics.stdev(last) if len(last) > 1 else 0:.2f}, over spectral {statistics.mean(gaps):+.2f} ± {spread:.2f} (paired), "
              f"{statistics.mean(s for _, s in runs):.1f} CPU s  ({tried})  [{time.process_time() - began:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
