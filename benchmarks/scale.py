"""Completion from 10⁶ to 10⁸ ratings: time per pass and memory per rank.

Ratings are drawn in pieces and never all there at once: 200 per user on average (log-normal
activity), items by a Zipf-like law, a pair at most once, values in steps of a half; 200 users per
10⁴ ratings, 4000 items at 10⁶ and more by the third root. Each size runs in processes of its own
with one thread each, over gloo if there are several. A pass is the loss and the gradient of the
point problem at rank 10 in float32; a step is one alternating step of the default point model; a
product is one exact Fisher product. Nanoseconds are CPU time per rating and pass, summed over
ranks. Memory is the peak of the resident set over that after the imports, of the largest rank, in
bytes per rating there: up to the end of the build (drawing included), of the pass, and of all;
"beyond 16" is what the pass exceeds 16 bytes per rating by, in float32 numbers per row or column
that is here.

Against: one rank
Takes: an hour for 10⁸
Page: docs/benchmarks/scale.md
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks._common import integers

SMOKE = "--sizes 1e4 --ranks 1,2"

RANK = 10
CHUNK = 2**17


def shape(count: int) -> tuple[int, int]:
    """Users and items of a table with so many ratings."""
    return max(count // 200, 20), max(round(4000 * (count / 1e6) ** (1 / 3)), 20)


class Popular:
    """A stream of ratings, the same whenever it is gone through, in pieces of whole users."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.users, self.items = shape(count)
        rng = np.random.default_rng(seed)
        activity = rng.lognormal(0, 1.0, self.users).astype(np.float32)
        self.share = np.cumsum((np.arange(1, self.items + 1) + 0.02 * self.items) ** -1.1)
        self.share /= self.share[-1]
        # a user who draws an item twice rates it once; a twentieth more draws makes up for it
        wanted = 1.05 * count * activity / activity.sum(dtype=np.float64)
        self.ends = np.cumsum(np.clip(np.ceil(wanted), 1, 0.6 * self.items).astype(np.int64))
        self.label = rng.permutation(self.items).astype(np.int32)
        self.right = rng.standard_normal((self.items, 4), dtype=np.float32)
        self.seed = seed

    def pieces(self, part: int = 0, parts: int = 1) -> Iterator[tuple[Any, Any, Any]]:
        """User numbers, item numbers and values of one of several runs of users."""
        first = self.users * part // parts
        last = self.users * (part + 1) // parts
        while first < last:
            begun = self.ends[first - 1] if first else 0
            stop = min(max(int(np.searchsorted(self.ends, begun + CHUNK)), first + 1), last)
            yield self.piece(first, stop, int(begun))
            first = stop

    def piece(self, first: int, stop: int, begun: int) -> tuple[Any, Any, Any]:
        rng = np.random.default_rng([self.seed, first])
        counts = np.diff(self.ends[first:stop], prepend=begun)
        drawn = np.searchsorted(self.share, rng.random(int(counts.sum()), dtype=np.float32)).clip(
            max=self.items - 1
        )
        pair = np.unique(
            np.repeat(np.arange(stop - first), counts) * self.items + self.label[drawn]
        )
        users = (pair // self.items).astype(np.int32)
        items = (pair % self.items).astype(np.int32)
        left = rng.standard_normal((stop - first, 4), dtype=np.float32)
        values = 0.5 * np.einsum("ij,ij->i", left[users], self.right[items])
        values += 0.8 * rng.standard_normal(len(users), dtype=np.float32)
        return users + np.int32(first), items, np.round(2 * values.clip(-4, 4)) / 2


def resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def ready(stream: Popular, group: Any) -> Any:
    """The ratings of this rank."""
    from fisherfold.completion import MatrixCompletion
    from fisherfold.completion.distributed_fit import share_out
    from fisherfold.completion.entries import Entries
    from fisherfold.completion.ratings import Ratings, Triplets
    from fisherfold.distributed import Axis

    if group.size == 1:
        axes = Axis.whole(stream.users), Axis.whole(stream.items)
        columns = (np.concatenate(parts) for parts in zip(*stream.pieces(), strict=True))
        return Ratings.over(axes, Triplets(*columns))

    pieces = [
        np.concatenate(parts) for parts in zip(*stream.pieces(group.rank, group.size), strict=True)
    ]
    share = Entries(
        pieces[0].astype(np.int64), pieces[1].astype(np.int64), pieces[2].astype(np.float64)
    )
    settings = MatrixCompletion(duplicates="error")._settings()
    return share_out(share, settings, group)[0].ratings


def one(count: int) -> dict[str, Any]:
    """Build and go through the ratings of one rank."""
    import torch

    # imported before memory is measured
    from fisherfold.completion import distributed_fit  # noqa: F401
    from fisherfold.completion.inference.start import start_posterior
    from fisherfold.completion.point.fit import sweep
    from fisherfold.completion.point.problem import CompletionProblem
    from fisherfold.distributed import joined

    torch.set_num_threads(1)
    torch.linalg.qr(torch.randn(50, 5))
    with joined() as group:
        base = resident()
        began = time.process_time(), time.perf_counter()
        ratings = ready(Popular(count), group)
        found: dict[str, Any] = {
            "build": time.process_time() - began[0],
            "build_wall": time.perf_counter() - began[1],
        }
        found["build_peak"] = resident() - base
        problem = CompletionProblem(ratings, RANK)
        x = problem.manifold.random_point(
            dtype=torch.float32, generator=torch.Generator().manual_seed(0)
        )
        problem.loss_and_gradient(x)

        def timed(name: str, work: Any, rounds: int = 2) -> None:
            began = time.process_time(), time.perf_counter()
            for _ in range(rounds):
                work()
            found[name] = (time.process_time() - began[0]) / rounds
            found[f"{name}_wall"] = (time.perf_counter() - began[1]) / rounds

        timed("pass", lambda: problem.loss_and_gradient(x.clone()))
        found["pass_peak"] = resident() - base
        fisher = problem.fisher(x, kind="exact")
        v = problem.gradient(x)
        timed("product", lambda: fisher._matvec(v))
        problem._last = fisher = problem._moments = None
        start = start_posterior(ratings, RANK, weight_strength=0.0)
        timed("step", lambda: sweep(start, ratings), 1)
        found |= {
            "ratings": ratings.n_ratings,
            "here": ratings.by_column.n_ratings,
            "stored": ratings.nbytes,
            "members": len(ratings.row_axis) + len(ratings.column_axis),
            "peak": resident() - base,
            "shape": ratings.shape,
        }
    return found


def run(count: int, ranks: int) -> list[dict[str, Any]]:
    """The ranks of one size, each a process of its own."""
    from torch.distributed import TCPStore

    # held here, as by the agent of torchrun: a port that rank 0 opens later can be taken in between
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    plain = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    several = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    command = [sys.executable, "-m", "benchmarks", "run", "scale", "--one", str(count)]
    started = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env=plain | ({} if ranks == 1 else {**several, "RANK": str(rank)}),
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"{count:.0e} ratings on {ranks} ranks failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def paper(nanoseconds: dict[str, float]) -> None:
    """10¹⁰ ratings on 64 hosts, from what one core was measured to need per rating."""
    hosts = 64
    cores = 16
    ratings = 10**10
    users = 5 * 10**7
    items = 10**5
    network = 25e9 / 8
    here = ratings / hosts
    width = RANK * (RANK + 1) // 2
    print(f"\n10^10 ratings on paper: {hosts} hosts of {cores} cores, {users:,} users shared out,")
    print(
        f"{items:,} items on every host, rank {RANK}, float32, 25 Gbit/s; a core as measured above"
    )
    print("at the largest size, no gain and no loss from its neighbours; ring all-reduce, not")
    print("overlapped, with 2 (hosts - 1)/hosts of the bytes on the wire.")
    print(f"{'':28}{'MB all-reduced':>16}{'compute, s':>12}{'network, s':>12}{'total, s':>10}")
    for name, key, floats in (
        ("loss and gradient", "pass", items * RANK + 1),
        ("row-block Fisher factors", "pass", items * width),
        ("exact Fisher product", "product", items * RANK),
        ("alternating step", "step", items * ((RANK + 1) * (RANK + 2) // 2 + 2 * (RANK + 1))),
    ):
        compute = (
            nanoseconds[key] * 1e-9 * here / cores if name != "row-block Fisher factors" else 0.0
        )
        wire = 2 * (hosts - 1) / hosts * 4 * floats / network
        print(f"{name:28}{4 * floats / 1e6:16.1f}{compute:12.2f}{wire:12.3f}{compute + wire:10.2f}")
    tables = 4 * (users / hosts + items) * (2 * width + 4 * RANK)
    model = 4 * (users + items) * RANK / 1e9
    print(
        f"memory per host: {16 * here / 1e9:.1f} GB of ratings + {tables / 1e9:.1f} GB of tables,"
    )
    print("(users/64 + items) times (2 p(p+1)/2 + 4 p) floats;")
    print(f"the model, (users + items) p floats, is {model:.1f} GB.")


def options(parser: ArgumentParser) -> None:
    sizes = integers("1e6,3e6,1e7,3e7,1e8")
    parser.add_argument("--sizes", type=integers, default=sizes, help="numbers of ratings")
    parser.add_argument("--ranks", type=integers, default=[1, 2], help="numbers of processes")
    parser.add_argument("--one", type=int, help=SUPPRESS)


def main(given: Namespace) -> None:
    if given.one:
        print(json.dumps(one(given.one)))
        return
    print("rank 10, float32, one thread per rank; ns of CPU time per rating (all ranks together)")
    heads = ("build ns", "pass ns", "product", "step ns", "pass s", "peak MB", "build B", "pass B")
    heads = "".join(f"{head:>9}" for head in (*heads, "all B"))
    print(f"{'ratings':>12}{'users x items':>18}{'ranks':>6}{heads}{'beyond 16':>10}")
    last: dict[str, float] = {}
    for ranks in given.ranks:
        for size in given.sizes:
            found = run(size, ranks)
            total = found[0]["ratings"]
            ns = {
                k: 1e9 * sum(f[k] for f in found) / total
                for k in ("build", "pass", "product", "step")
            }
            worst = max(found, key=lambda f: f["peak"])
            beyond = (worst["pass_peak"] - 16 * worst["here"]) / (4 * worst["members"])
            size = " x ".join(map(str, found[0]["shape"]))
            bytes_each = [worst[key] / worst["here"] for key in ("build_peak", "pass_peak", "peak")]
            figures = f"{ns['build']:9.0f}{ns['pass']:9.1f}{ns['product']:9.1f}{ns['step']:9.1f}"
            figures += f"{found[0]['pass_wall']:9.2f}{worst['peak'] / 2**20:9.0f}"
            figures += "".join(f"{each:9.1f}" for each in bytes_each)
            print(f"{total:12,}{size:>18}{ranks:6}{figures}{beyond:10.0f}", flush=True)
            if ranks == 1:
                last = ns
    paper(last or ns)
