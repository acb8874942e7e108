"""Does a run that was cut off go on as one that was not? Losses and accuracies of both, epoch by epoch.

    PYTHONPATH=src python benchmarks/gpu/cifar_resume.py --device cuda

Each preset is trained for four epochs on a part of CIFAR-100 three times: whole, whole again, and cut off after two
epochs and resumed from its checkpoint by a new run. The second says whether the device repeats itself at all. Networks
are not compiled, the updates of SGDP and AdamP are.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

from fisherfold.training import RunLog, train
from fisherfold.training.train import Job

EPOCHS, CUT = 4, 2


class CutOffError(Exception):
    pass


def cut_off(_: Job, entry: dict[str, Any]) -> None:
    if entry["epoch"] == CUT:
        raise CutOffError


def three_ways(preset: str, given: argparse.Namespace, folder: Path) -> list[list[tuple[float, float]]]:
    """Training loss and accuracy of every epoch: whole, again, and resumed."""
    found = []
    for way in ("whole", "again", "resumed"):
        options: dict[str, Any] = {
            "folder": folder / way, "device": given.device, "images": given.images, "epochs": EPOCHS,
            "compiled": False, "checkpoint_every": 1,
        }  # fmt: skip
        if way == "resumed":
            with contextlib.suppress(CutOffError):
                train("cifar100", given.model, preset, tell=cut_off, **options)
        log: RunLog = train("cifar100", given.model, preset, **options)[0]
        found.append([(float(epoch["train_loss"]), float(epoch["accuracy"])) for epoch in log.epochs])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--images", type=int, default=12800)
    parser.add_argument("--model", default="vgg16bn")
    parser.add_argument("--preset", action="append", help="sgd, sgdp, adamp, kfac and mkfac if not given")
    given = parser.parse_args()
    same = True
    for preset in given.preset or ("sgd", "sgdp", "adamp", "kfac", "mkfac"):
        with tempfile.TemporaryDirectory() as folder:
            whole, again, resumed = three_ways(preset, given, Path(folder))
        losses = " ".join(f"{loss:.5f}" for loss, _ in whole)
        verdicts = ["the same bits" if run == whole else "different" for run in (again, resumed)]
        print(f"{preset:6} losses {losses}; again: {verdicts[0]}; resumed: {verdicts[1]}", flush=True)
        same &= again != whole or resumed == whole
    sys.exit(0 if same else "a resumed run went another way on a device that repeats itself")


if __name__ == "__main__":
    main()
