"""Checkpoints over several processes: the first one reads and writes for all, and what it refuses all refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fisherfold import MatrixCompletion
from fisherfold.completion.point.problem import CompletionProblem
from fisherfold.completion.ratings import Ratings
from fisherfold.distributed import ALONE, Group
from fisherfold.files import write_tensors
from fisherfold.solvers import GradientNorm, minimize
from toy import slow

from ranks import on_ranks, same_bits  # isort: skip
from test_shared_problems import shared  # isort: skip
from test_shared_subspace import rows  # isort: skip

METHODS: dict[str, dict[str, Any]] = {
    "rngd": {},
    "rngd-vr": {"step": 0.3, "batch_size": 4, "fisher": "kronecker"},
    "rcg": {},
    "rsgd": {"step": 0.05, "batch_size": 4},
}


def run(ratings: Ratings, method: str, **options: Any) -> list[Any]:
    problem = CompletionProblem(ratings, 2)
    x0 = problem.manifold.random_point(
        generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    result = minimize(
        problem, x0, method, seed=3, stop=GradientNorm(0.0), **METHODS[method], **options
    )
    return [result.last, result.x, result.value, result.trace["loss"], result.trace["samples"]]


def resumed_from_the_folder_of_rank_0(folder: str) -> dict[str, Any]:
    """Every rank names a folder of its own, as on hosts that share no disk; only that of rank 0 exists."""
    group = Group()
    ratings, place = shared(group), Path(folder) / f"host{group.rank}" / "c"
    found: dict[str, Any] = {}
    for method in METHODS:
        kept = {"checkpoint": place, "resume": True}
        whole = run(ratings, method, max_iter=5)
        run(ratings, method, max_iter=2, **kept)
        again = run(ratings, method, max_iter=5, **kept)
        found[method] = [whole, again, place.exists()]
        if group.is_first:
            place.unlink()
    return found


@pytest.mark.parametrize("world", [2, *slow(3)])
def test_only_the_first_process_needs_the_file(world: int, tmp_path: Path) -> None:
    (tmp_path / "host0").mkdir()
    ranks = on_ranks(world, tmp_path, resumed_from_the_folder_of_rank_0, str(tmp_path))
    for rank, found in enumerate(ranks):
        for whole, again, kept in found.values():
            same_bits([whole, again])
            assert kept == (rank == 0)
    same_bits([{method: parts[:2] for method, parts in found.items()} for found in ranks])


def said(call: Any) -> list[str]:
    try:
        call()
    except (ValueError, OSError) as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def refusals(folder: str) -> dict[str, list[str]]:
    group = Group()
    ratings, place = shared(group), Path(folder) / f"host{group.rank}" / "c"

    def resume(**options: Any) -> list[str]:
        return said(
            lambda: run(ratings, "rngd", max_iter=3, checkpoint=place, resume=True, **options)
        )

    run(ratings, "rngd", max_iter=2, checkpoint=place, tag="ours")
    found = {"another problem": resume(tag="theirs")}
    if group.is_first:
        whole = place.read_bytes()
        place.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    found["damaged"] = resume(tag="ours")
    if group.is_first:
        place.write_bytes(whole[:100])
    found["cut"] = resume(tag="ours")
    if group.is_first:
        header = {"method": "rngd", "tag": "ours"}
        write_tensors(place, {"x": torch.ones(2)}, kind="checkpoint", version=1, header=header)
    found["not ours"] = resume(tag="ours")
    if group.is_first:
        place.unlink()
        place.mkdir()
    found["folder"] = resume()
    place = Path(folder) / "nowhere" / "c"
    found["nowhere"] = resume()
    # a fit that was refused leaves the processes in step
    found["after"] = ["", f"{run(ratings, 'rngd', max_iter=1)[2]:.3e}"]
    return found


def test_what_the_first_process_refuses_all_refuse_with_its_words(tmp_path: Path) -> None:
    (tmp_path / "host0").mkdir()
    ranks = on_ranks(3, tmp_path, refusals, str(tmp_path))
    assert ranks[0] == ranks[1] == ranks[2]
    place = tmp_path / "host0" / "c"
    problem = (
        f"rank 0: {place} is a checkpoint of another problem; remove the file or name another one"
    )
    assert ranks[0]["another problem"] == ["ValueError", problem]
    assert ranks[0]["damaged"] == [
        "ValueError",
        f"rank 0: {place} is damaged: its checksum does not match",
    ]
    kind, sentence = ranks[0]["cut"]
    assert kind == "ValueError"
    assert sentence.startswith(
        f"rank 0: {place} is damaged or not a checkpoint file of fisherfold: "
    )
    sentence = (
        f"rank 0: {place} is damaged or not a checkpoint file of fisherfold: it lacks 'generator'"
    )
    assert ranks[0]["not ours"] == ["ValueError", sentence]
    sentence = f"rank 0: checkpoint {place}: it is a folder, a file is expected"
    assert ranks[0]["folder"] == ["IsADirectoryError", sentence]
    kind, sentence = ranks[0]["nowhere"]
    assert kind == "FileNotFoundError"
    assert sentence.endswith(f"nowhere/c: the folder {tmp_path / 'nowhere'} does not exist")


def writing(folder: str) -> list[list[str]]:
    """Refusals of the system while the first process writes."""
    group = Group()
    found = []
    for error in (
        OSError(28, "No space left on device"),
        PermissionError("no"),
        IsADirectoryError("a folder"),
    ):

        def write(error: OSError = error) -> None:
            with group.together():
                if group.is_first:
                    raise error

        found.append(said(write))
    return found


def messages(_: str) -> list[Any]:
    """How often the processes wait for each other where nobody has a fault to tell, and what is told is told whole."""
    group, counts = Group(), []
    for name in ("all_reduce", "broadcast"):
        plain = getattr(torch.distributed, name)
        setattr(
            torch.distributed,
            name,
            lambda *a, plain=plain, name=name, **k: counts.append(name) or plain(*a, **k),
        )
    with group.together():
        pass
    texts = group.gather_objects("ü\0" * group.rank)
    return [counts, texts]


def test_processes_without_a_fault_wait_for_each_other_once(tmp_path: Path) -> None:
    for counts, texts in on_ranks(3, tmp_path, messages, ""):
        assert texts == ["", "ü\0", "ü\0ü\0"]
        assert counts == ["all_reduce"]


def test_a_full_disk_ends_all_processes_with_one_sentence(tmp_path: Path) -> None:
    expected = [
        ["OSError", "rank 0: [Errno 28] No space left on device"],
        ["PermissionError", "rank 0: no"],
        ["IsADirectoryError", "rank 0: a folder"],
    ]
    assert on_ranks(2, tmp_path, writing, "") == [expected, expected]


def test_one_process_alone_says_it_without_a_rank(tmp_path: Path) -> None:
    ratings = shared(ALONE)
    run(ratings, "rngd", max_iter=1, checkpoint=tmp_path / "c", tag="ours")
    kind, sentence = said(
        lambda: run(ratings, "rngd", max_iter=2, checkpoint=tmp_path / "c", resume=True)
    )
    assert kind == "ValueError"
    assert sentence.startswith(f"{tmp_path / 'c'} is a checkpoint of another problem")
    kind, sentence = said(lambda: run(ratings, "rngd", max_iter=1, checkpoint=tmp_path))
    assert [kind, sentence] == [
        "IsADirectoryError",
        f"checkpoint {tmp_path}: it is a folder, a file is expected",
    ]


def refused_estimators(folder: str) -> list[list[str]]:
    """A checkpoint of another fit, and one that is broken, for every kind of estimator; only rank 0 has the folder."""
    group = Group()
    _, y, task = rows()
    mine = np.arange(group.rank, len(y), group.size)
    pairs = np.column_stack([task, np.arange(len(y)) % 20])
    found = []
    for inference in ("variational",):
        place = Path(folder) / f"host{group.rank}" / inference
        if group.is_first:
            place.write_bytes(b"not a checkpoint")
        model = MatrixCompletion(rank=2, inference=inference, max_iter=2, duplicates="mean")
        share = (pairs[mine], y[mine])
        found.append(said(lambda m=model, s=share, p=place: m.fit_share(*s, checkpoint=p)))
    return found


def test_estimators_refuse_a_broken_checkpoint_together(tmp_path: Path) -> None:
    (tmp_path / "host0").mkdir()
    ranks = on_ranks(2, tmp_path, refused_estimators, str(tmp_path))
    assert ranks[0] == ranks[1]
    for kind, sentence in ranks[0]:
        assert kind == "ValueError"
        assert sentence.startswith(f"rank 0: {tmp_path / 'host0'}")
        assert "is damaged or not a" in sentence
