"""Work through a list of training commands, several processes at a time, until the time is up.

    python benchmarks/cifar/run_plan.py plan.txt --processes 8 --minutes 25

Each line of the plan holds the arguments of train.py. Finished runs are skipped, interrupted ones resume from their
checkpoints. On an NVIDIA GPU start the MPS control daemon first: processes then share the device.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

TRAIN = Path(__file__).with_name("train.py")


def work(runs: Sequence[Sequence[str]], processes: int, until: float) -> int:
    """Run train.py with each list of arguments, and return how many are left at the time ``until``."""
    waiting, active = [list(run) for run in runs], []
    while (waiting or active) and time.monotonic() < until:
        while waiting and len(active) < processes:
            active.append(subprocess.Popen([sys.executable, str(TRAIN), *waiting.pop(0)]))
        active = [process for process in active if process.poll() is None]
        time.sleep(0.5)
    for process in active:
        process.terminate()
    return len(waiting) + len(active)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=60)
    given = parser.parse_args()
    lines = given.plan.read_text().splitlines()
    runs = [shlex.split(line) for line in lines if line and not line.startswith("#")]
    print(f"{work(runs, given.processes, time.monotonic() + 60 * given.minutes)} runs are left")


if __name__ == "__main__":
    main()
