"""How far apart fits on 1, 2 and 3 ranks end, by the noise in the values.

Tables of 60 × 40 and rank 3, of which 40 % are seen, in four draws; noise in standard deviations of
the values. The largest difference between predictions of one rank and of two or three, in the same
unit, and the passes they made.

Against: the fit of one rank
Takes: two minutes
Page: docs/guides/several-processes.md
"""

from __future__ import annotations

import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np
import torch
from torch import distributed, multiprocessing

from benchmarks._common import show, table
from fisherfold import MatrixCompletion

SMOKE = "--draws 1 --ranks 2"

NOISE = (0.2, 0.02, 0.001, 0.0)
DTYPES = ("float32", "float64")


def fits(draws: int) -> dict[tuple[str, float, int], tuple[torch.Tensor, int]]:
    rank = distributed.get_rank()
    world = distributed.get_world_size()
    found = {}
    for noise in NOISE:
        for draw in range(draws):
            rng = np.random.default_rng(draw)
            x = rng.normal(size=(60, 3)) @ rng.normal(size=(3, 40))
            pairs = np.argwhere(rng.random(x.shape) < 0.4)
            values = x[tuple(pairs.T)] + noise * x.std() * rng.normal(size=len(pairs))
            for dtype in DTYPES:
                model = MatrixCompletion(rank=3, dtype=dtype).fit_share(
                    pairs[rank::world], values[rank::world]
                )
                predicted = model.predict(np.argwhere(x < np.inf)) / x.std()
                found[dtype, noise, draw] = torch.from_numpy(predicted), len(model.trace_)
    return found


def enter(rank: int, world: int, folder: str, draws: int) -> None:
    torch.set_num_threads(1)
    # no port that another process could take before rank 0 does
    place = f"file://{folder}/meeting-{world}"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=world)
    found = fits(draws)
    if rank == 0:
        torch.save(found, Path(folder) / f"{world}.pt")
    distributed.destroy_process_group()


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--draws", type=int, default=4, help="of the table (4)")
    parser.add_argument("--ranks", type=int, default=3, help="at most (3)")


def main(given: Namespace) -> None:
    worlds = range(1, given.ranks + 1)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in worlds:
            start = (world, folder, given.draws)
            multiprocessing.start_processes(enter, start, nprocs=world, start_method="spawn")
            found[world] = torch.load(Path(folder) / f"{world}.pt", weights_only=True)
    heads = (
        "dtype",
        "noise",
        "largest difference",
        *(f"passes, {world} ranks" for world in worlds),
    )
    shown = table("Predictions on several ranks against one", heads)
    for dtype in DTYPES:
        for noise in NOISE:
            cells = [(dtype, noise, draw) for draw in range(given.draws)]
            apart = max(
                float((found[1][c][0] - found[w][c][0]).abs().max())
                for w in worlds[1:]
                for c in cells
            )
            passes = (" ".join(str(found[w][c][1]) for c in cells) for w in worlds)
            shown.add_row(dtype, f"{noise:g}", f"{apart:.0e}", *passes)
    show(shown)
