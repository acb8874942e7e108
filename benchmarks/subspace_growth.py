"""How the cost grows with the number of tasks: 50 features, rank 6, 20 rows per task.

OMP_NUM_THREADS=1 python benchmarks/subspace_growth.py [--most 100000]        (CPU seconds)
"""

from __future__ import annotations

import argparse
import resource
import time

import torch

from fisherfold.subspace.marginal_fit import fit_marginal
from fisherfold.subspace.problem import SubspaceProblem
from fisherfold.subspace.tasks import TaskStatistics


def make(n_tasks, n=50, per_task=20, rank=6, chunk=5000):
    """Statistics accumulated chunk by chunk: the rows never exist all at once."""
    g = torch.Generator().manual_seed(0)
    frame = torch.linalg.qr(torch.randn(n, rank, generator=g, dtype=torch.float64))[0]
    mean = torch.randn(n, generator=g, dtype=torch.float64) / n**0.5
    statistics, seconds = TaskStatistics.empty(n_tasks, n), 0.0
    for first in range(0, n_tasks, chunk):
        count = min(chunk, n_tasks - first)
        task = torch.arange(first, first + count).repeat_interleave(per_task)
        X = torch.randn(len(task), n, generator=g, dtype=torch.float64)
        weights = mean + torch.randn(count, rank, generator=g, dtype=torch.float64) @ frame.T
        y = (X * weights[task - first]).sum(1) + 0.5 * torch.randn(len(task), generator=g, dtype=torch.float64)
        began = time.process_time()
        statistics.add(X, y, task)
        seconds += time.process_time() - began
    return statistics, frame, seconds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=100_000)
    most = parser.parse_args().most
    names = ("tasks", "rows", "statistics s", "one pass s", "per task µs", "fit s", "rounds", "angle to truth", "GiB")
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    n_tasks = 100
    while n_tasks <= most:
        statistics, frame, adding = make(n_tasks)
        problem = SubspaceProblem(statistics, rank=6, ridge=1.0)
        x = problem.manifold.random_point(generator=torch.Generator().manual_seed(1))
        times = []
        for _ in range(3):
            began = time.process_time()
            problem.loss_and_gradient(x.clone())
            times.append(time.process_time() - began)
        began = time.process_time()
        fit = fit_marginal(statistics, rank=6, tol=1e-6)
        fitting = time.process_time() - began
        angle = float(problem.manifold.dist(fit.prior.frame, frame))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"| {n_tasks:,} | {20 * n_tasks:,} | {adding:.3f} | {min(times):.4f} | {1e6 * min(times) / n_tasks:.2f} | "
            f"{fitting:.2f} | {len(fit.trace)} | {angle:.4f} | {memory:.2f} |",
            flush=True,
        )
        del statistics, problem, fit
        n_tasks *= 10


if __name__ == "__main__":
    main()
