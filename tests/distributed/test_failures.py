"""A killed process: the others name it and end; torchrun goes on from the checkpoint and comes to the same bits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import multiprocessing

from fisherfold import MatrixCompletion, SubspaceRegressor
from toy import slow

import fit_and_die  # isort: skip
from fits import PASSES, dying, resumed, whole  # isort: skip
from ranks import free_port, meeting, on_ranks, same_bits  # isort: skip

SCRIPT = Path(__file__).with_name("fit_and_die.py")
SOURCE = str(Path(__file__).parents[2] / "src")
BOUND = 120  # seconds; what is asserted is that they end, not how fast


def environment(**more: str) -> dict[str, str]:
    known = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")]),
    }
    return {**os.environ, **known, **more}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes learn that nobody disturbs."""
    return dict(on_ranks(2, tmp_path_factory.mktemp("whole"), whole)[0])


@pytest.fixture
def ratings(tmp_path: Path) -> Path:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(30, 2)) @ rng.normal(size=(2, 20)) + 0.1 * rng.normal(size=(30, 20))
    rows, columns = np.nonzero(rng.random(x.shape) < 0.5)
    lines = [f"{r},{c},{x[r, c]:.4f}" for r, c in zip(rows, columns, strict=True)]
    path = tmp_path / "ratings.csv"
    path.write_text("row,column,value\n" + "\n".join(lines) + "\n")
    return path


def die(rank: int, world: int, place: dict[str, str], folder: str, arguments: list[str]) -> None:
    """What ``fit_and_die.py`` does under a launcher; what it says is left in a file."""
    torch.set_num_threads(1)
    os.environ |= place | {"RANK": str(rank), "WORLD_SIZE": str(world)}
    sys.argv[1:] = arguments
    with open(Path(folder) / f"{rank}.txt", "w") as sys.stdout:
        fit_and_die.main()


def test_survivors_name_the_killed_rank(tmp_path: Path) -> None:
    world, victim, context = 3, 1, multiprocessing.get_context("forkserver")
    words = [str(tmp_path / "c"), str(tmp_path / "model"), str(victim), "2"]
    with meeting() as place:
        processes = [
            context.Process(target=die, args=(r, world, place, str(tmp_path), words))
            for r in range(world)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(BOUND)
    assert processes[victim].exitcode == -9
    for rank in (0, 2):
        said = (tmp_path / f"{rank}.txt").read_text()
        assert processes[rank].exitcode == 3, said
        assert f"rank {rank} says [1]: rank 1 has ended or does not answer" in said
        assert "checkpoint" in said
    assert (tmp_path / "c").exists()
    assert not (tmp_path / "model").exists()


STOPPED = """
import os, signal, sys
import torch
from fisherfold.distributed import RankLost, group as module, joined
module._PATIENCE = 2.0
try:
    with joined(float(sys.argv[1])) as group:
        group.sum(torch.ones(3))
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        group.sum(torch.ones(3))
except RankLost as error:
    print(error.ranks, error, flush=True)
    os._exit(3)
"""


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_while_it_is_waited_for_and_after_the_timeout() -> None:
    with meeting() as place:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", STOPPED, "6"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(RANK=str(r), WORLD_SIZE="3", **place),
            )
            for r in range(3)
        ]
        try:
            for rank in (0, 2):
                said, errors = processes[rank].communicate(timeout=BOUND)
                assert said.startswith(
                    f"[1] rank 1 has ended or does not answer; rank {rank} stops"
                )
                assert re.search(
                    rf"rank {rank} has waited [2-5] s for rank 1, and waits on", errors
                )
                assert processes[rank].returncode == 3
        finally:
            processes[1].kill()
            processes[1].communicate()


def run(arguments: list[str], restarts: int) -> subprocess.CompletedProcess[str]:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        str(restarts),
    ]
    while True:
        rendezvous = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        done = subprocess.run(
            [*launcher, *rendezvous, *arguments],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=BOUND,
        )
        if (
            "EADDRINUSE" not in done.stderr
        ):  # torchrun opens the port itself, and another process may be quicker
            return done


@pytest.mark.slow
def test_torchrun_goes_on_from_the_checkpoint_to_the_same_bits(
    tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    script = [str(SCRIPT), str(tmp_path / "checkpoint"), str(tmp_path / "model"), "1", "3"]
    done = run(script, restarts=1)
    assert done.returncode == 0, done.stderr
    # three passes were kept before the kill, the others were left
    assert len(re.findall(f"made {PASSES - 3} passes", done.stdout)) == 2
    found = torch.load(tmp_path / "model", weights_only=True)
    same_bits([found, uninterrupted])


@pytest.mark.parametrize("victim", [0, *slow(1)])
def test_a_fit_goes_on_after_a_kill_to_the_same_bits(
    victim: int, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    with pytest.raises(
        multiprocessing.ProcessExitedException, match=f"process {victim} terminated .*SIGKILL"
    ):
        on_ranks(2, tmp_path, dying, str(tmp_path / "c"), victim, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    again = on_ranks(2, tmp_path, resumed, str(tmp_path / "c"))
    same_bits(again)
    same_bits([[uninterrupted, PASSES - 3], again[0]])


def sleep() -> None:
    time.sleep(600)


@pytest.mark.slow
def test_processes_that_do_not_end_are_killed_and_named(tmp_path: Path) -> None:
    with pytest.raises(
        TimeoutError, match=r"^ranks \[0, 1\] of 2 did not end within 0\.1 seconds$"
    ):
        on_ranks(2, tmp_path, sleep, bound=0.1)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_the_command_line_under_torchrun(tmp_path: Path, ratings: Path) -> None:
    """Both commands, one process and two, evaluated by the models that they write."""
    rng = np.random.default_rng(0)
    x, task = rng.normal(size=(200, 3)), rng.integers(0, 8, 200)
    y = x[:, 0] * task + 0.1 * rng.normal(size=200)
    rows = [",".join(f"{v:.6f}" for v in (*x[k], y[k])) + f",s{task[k]}" for k in range(200)]
    (tmp_path / "rows.csv").write_text("a,b,c,y,school\n" + "\n".join(rows) + "\n")
    subspace = [
        "subspace",
        "fit",
        str(tmp_path / "rows.csv"),
        "--target",
        "y",
        "--task",
        "school",
        "--rank",
        "2",
    ]
    complete = ["complete", "fit", str(ratings), "--rank", "2"]
    for name, command in (("subspace", subspace), ("complete", complete)):
        one = [
            sys.executable,
            "-m",
            "fisherfold",
            *command,
            "-o",
            str(tmp_path / f"{name}1"),
            "--json",
        ]
        alone = subprocess.run(
            one, capture_output=True, text=True, env=environment(), timeout=BOUND, check=True
        )
        done = run(
            ["-m", "fisherfold", *command, "-o", str(tmp_path / f"{name}2"), "--json"], restarts=0
        )
        assert done.returncode == 0, done.stderr
        facts = [json.loads(text.splitlines()[-1]) for text in (alone.stdout, done.stdout)]
        assert facts[1]["processes"] == 2
        assert facts[0]["rank"] == facts[1]["rank"] == 2
        assert len(done.stdout.splitlines()) == 1
    models = [SubspaceRegressor.load(tmp_path / f"subspace{k}") for k in (1, 2)]
    np.testing.assert_allclose(models[0].coef_, models[1].coef_, rtol=1e-6, atol=1e-8)
    pairs = [(r, c) for r in range(5) for c in range(5)]
    one, two = (MatrixCompletion.load(tmp_path / f"complete{k}").predict(pairs) for k in (1, 2))
    np.testing.assert_allclose(one, two, rtol=1e-2, atol=1e-2)


def test_a_group_that_carries_nothing_but_tensors_of_gpus_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for name, value in (("get_world_size", 2), ("get_rank", 0), ("get_backend", "nccl")):
        monkeypatch.setattr(torch.distributed, name, lambda _=None, value=value: value)
    with pytest.raises(ValueError, match=r"backend nccl alone.*start torch\.distributed with gloo"):
        MatrixCompletion(2).fit_share(np.zeros((1, 2)), np.ones(1))
