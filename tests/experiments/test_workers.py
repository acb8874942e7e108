"""Processes of an experiment end with their block, also one that sleeps through its first signal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import signal, sys, time
from fisherfold.experiments import workers

def deaf_at_first(path):
    leave, heard = signal.getsignal(signal.SIGTERM), []

    def hear(*_):
        heard.append(1)
        if len(heard) > 1:
            open(path, "a").write("left\\n")
            leave()

    signal.signal(signal.SIGTERM, hear)

if __name__ == "__main__":
    with workers.processes(2, deaf_at_first, (sys.argv[1],)) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
        for _ in range(2):
            pool.apply_async(time.sleep, (600,))
        time.sleep(2)
    print("ended")
"""


def test_processes_that_sleep_through_a_signal_end_all_the_same(tmp_path: Path) -> None:
    program, account = tmp_path / "program.py", tmp_path / "account"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), str(account)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "ended\n"
    assert account.read_text() == "left\n" * 2
