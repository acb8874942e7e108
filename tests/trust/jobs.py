"""Long work that is killed in ``test_kill.py``: the command line, a figure of the paper, and a training."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
from fisherfold.reproduce.plots import write_figure
from sklearn.datasets import load_digits
from torch import nn

import fisherfold
from fisherfold.cli import main
from fisherfold.files import read_tensors, write_tensors
from fisherfold.reproduce.figures import run_figure
from fisherfold.reproduce.plans import FigurePlan, MethodPlan
from fisherfold.subspace.problem import SubspaceProblem
from fisherfold.subspace.tasks import TaskStatistics

STEPS = 30
# what the jobs import when they are called, imported before the fork, so that a kill comes while they work
for name in ("completion.cross_validation", "subspace.classifier", "subspace.files"):
    importlib.import_module(f"fisherfold.{name}")
for name in ("torch._dynamo", "fisherfold.optim"):  # the first by every optimizer
    importlib.import_module(name)


def command_line(*words):
    """``fisherfold`` with these words."""
    sys.argv = ["fisherfold", *words]
    main()


def problem(seed):
    g = torch.Generator().manual_seed(seed)
    task = torch.arange(400) % 40
    X = torch.randn(400, 6, generator=g, dtype=torch.float64)
    shared = torch.randn(6, 2, generator=g, dtype=torch.float64)
    y = (X @ shared * torch.randn(40, 2, generator=g, dtype=torch.float64)[task]).sum(1)
    y = y + 0.1 * torch.randn(400, generator=g, dtype=torch.float64)
    train, test = (TaskStatistics.from_rows(X[k::2], y[k::2], task[k::2], n_tasks=40) for k in (0, 1))
    made = SubspaceProblem(train, rank=2, ridge=1e-4, factor_damping=1e-6, held_out=test)
    return made, made.manifold.random_point(generator=g)


def figure(folder):
    """A figure like those of ``fisherfold reproduce``: four methods, searched steps, recorded runs."""
    draws = {"batch_size": 1, "sampling": "replacement"}
    methods = (
        MethodPlan("RNGD", "rngd-vr", 2, (0.3,), draws), MethodPlan("RSGD", "rsgd", 1, (0.1, 0.01, 0.001), draws),
        MethodPlan("RSVRG", "rsvrg", 3, (0.1, 0.01), draws), MethodPlan("RCG", "rcg", 1),
    )  # fmt: skip
    plan = FigurePlan("small", "A small figure", problem, methods, 12, {"held_out_nmse": "held-out"})
    write_figure(run_figure(plan, seeds=3, output=Path(folder)), Path(folder))


def training(folder):
    """A network with batch norm on digits, as in ``examples/train_digits.py``, with a checkpoint after every step."""
    digits = load_digits()
    x, y = torch.tensor(digits.data[:500] / 16.0, dtype=torch.float32), torch.tensor(digits.target[:500])
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)
    )
    opt = fisherfold.MKFAC(model, lr=0.1, manifold_lr=0.1, damping=0.01, every=3, example_input=x[:32])
    file, done = Path(folder) / "training.checkpoint", 0
    if file.exists():
        done = resume(file, model, opt)
    for step in range(done, STEPS):
        batch = torch.randperm(500)[:100]
        opt.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        opt.step()
        keep(file, model, opt, step + 1)
    write_tensors(Path(folder) / "model.safetensors", model.state_dict(), kind="net", version=1, header={})
    file.unlink()


def keep(file, model, opt, done):
    tensors = {"generator": torch.get_rng_state()}
    state = {"model": dict(model.state_dict()), "optimizer": opt.state_dict()}
    write_tensors(file, tensors, kind="run", version=1, header={"done": done, "tree": flat(state, tensors)})


def resume(file, model, opt):
    tensors, header = read_tensors(file, kind="run", version=1)
    state = whole(header["tree"], tensors)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["optimizer"])
    torch.set_rng_state(tensors["generator"])
    return header["done"]


def flat(tree, tensors):
    """The tree with tensors replaced by their names; dictionaries as pairs, since keys may be numbers."""
    if isinstance(tree, torch.Tensor):
        tensors[f"t{len(tensors)}"] = tree
        return {"tensor": f"t{len(tensors) - 1}"}
    if isinstance(tree, dict):
        return {"pairs": [[key, flat(value, tensors)] for key, value in tree.items()]}
    if isinstance(tree, (list, tuple)):
        return {"list": [flat(value, tensors) for value in tree]}
    return {"plain": tree}


def whole(tree, tensors):
    (kind, content), = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "pairs":
        return {key: whole(value, tensors) for key, value in content}
    return [whole(value, tensors) for value in content] if kind == "list" else content


JOBS = {f.__name__: f for f in (command_line, figure, training)}
