"""Processes that make runs: results as they are done, and an error where one is killed."""

from __future__ import annotations

import os
import signal

import pytest

from fisherfold.reproduce.workers import Workers


def leave(number: int) -> None:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_an_error_and_not_a_wait():
    with Workers(1) as workers:
        assert list(workers.each(leave, [1, 2])) == [None, None]
        with pytest.raises(RuntimeError, match="a worker process was killed"):
            list(workers.each(leave, [3, 4]))
