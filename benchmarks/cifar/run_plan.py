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
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=60)
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    waiting = [shlex.split(line) for line in given.plan.read_text().splitlines() if line and not line.startswith("#")]
    train, active = Path(__file__).with_name("train.py"), []
    while (waiting or active) and time.monotonic() < until:
        while waiting and len(active) < given.processes:
            active.append(subprocess.Popen([sys.executable, str(train), *waiting.pop(0)]))
        active = [process for process in active if process.poll() is None]
        time.sleep(0.5)
    for process in active:
        process.terminate()
    print(f"{len(waiting) + len(active)} runs are left")


if __name__ == "__main__":
    main()
