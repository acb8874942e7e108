"""How far apart 1, 2 and 3 ranks end: rounding, as little noise in the values makes more of it.

    OMP_NUM_THREADS=1 python benchmarks/completion_rank_rounding.py

Tables of 60 × 40 and rank 3, of which 40 % are seen, in four draws; noise in standard deviations of the values. The
largest difference between predictions of one rank and of two or three, in the same unit, and the passes they made.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import distributed, multiprocessing

from fisherfold import MatrixCompletion

NOISE, DRAWS, DTYPES, WORLDS = (0.2, 0.02, 0.001, 0.0), range(4), ("float32", "float64"), (1, 2, 3)


def fits() -> dict[tuple[str, float, int], tuple[torch.Tensor, int]]:
    rank, world = distributed.get_rank(), distributed.get_world_size()
    found = {}
    for noise in NOISE:
        for draw in DRAWS:
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


def enter(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    place = f"file://{folder}/meeting-{world}"  # no port that another process could take before rank 0 does
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=world)
    found = fits()
    if rank == 0:
        torch.save(found, Path(folder) / f"{world}.pt")
    distributed.destroy_process_group()


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in WORLDS:
            multiprocessing.start_processes(
                enter, (world, folder), nprocs=world, start_method="spawn"
            )
            found[world] = torch.load(Path(folder) / f"{world}.pt", weights_only=True)
    table = Table(
        "dtype", "noise", "largest difference", *(f"passes, {world} ranks" for world in WORLDS)
    )
    for dtype in DTYPES:
        for noise in NOISE:
            cells = [(dtype, noise, draw) for draw in DRAWS]
            apart = max(
                float((found[1][c][0] - found[w][c][0]).abs().max())
                for w in WORLDS[1:]
                for c in cells
            )
            passes = (" ".join(str(found[w][c][1]) for c in cells) for w in WORLDS)
            table.add_row(dtype, f"{noise:g}", f"{apart:.0e}", *passes)
    Console().print(table)


if __name__ == "__main__":
    main()
