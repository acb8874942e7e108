"""Processes of an experiment end with their block, also one that sleeps through its first signal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import signal, sys, time
from fisherfold.reproduce import workers

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


LEAVES_ON_ITS_OWN = """
import atexit, os, signal
from fisherfold.reproduce import workers

def start():
    pass

if __name__ == "__main__":
    with workers.processes(2, start, ()) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
        pool.close()
        pool.join()
    print("ended")
else:
    atexit.register(os.kill, os.getpid(), signal.SIGTERM)
"""


def test_a_signal_amid_the_clean_up_of_a_process_is_no_trace(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LEAVES_ON_ITS_OWN)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("ended\n", "")
