"""What goes wrong where several machines meet: every process ends, with one sentence, and no work is lost."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import distributed
from typer.testing import CliRunner

from fisherfold import MatrixCompletion, SubspaceRegressor
from fisherfold.cli import app
from fisherfold.distributed import Group, RankLost, joined
from fisherfold.tables.checkpoint import FitCheckpoint

from ranks import compare, on_ranks, same_bits  # isort: skip
from test_shared_subspace import rows  # isort: skip

pytestmark = pytest.mark.slow

TABLE = np.random.default_rng(0)
VALUES = (
    3 + TABLE.normal(size=(23, 2)) @ TABLE.normal(size=(2, 13)) + 0.1 * TABLE.normal(size=(23, 13))
)
PAIRS = np.argwhere(TABLE.random(VALUES.shape) < 0.6)
SMALL: dict[str, Any] = {"rank": 2, "tol": 0.0, "max_iter": 4}


def ratings(group: Group) -> tuple[Any, Any]:
    """A run of the entries for each process, so that all of them are in the order of one process."""
    cut = [len(PAIRS) * k // group.size for k in range(group.size + 1)]
    mine = PAIRS[cut[group.rank] : cut[group.rank + 1]]
    return mine, VALUES[mine[:, 0], mine[:, 1]]


def of_rank_one() -> list[Any]:
    """The smallest model of each kind: its tables have one column."""
    group, (X, y, task) = Group(), rows()
    found: list[Any] = []
    for options in ({}, {"inference": "point"}, {"inference": "point", "solver": "rngd"}):
        model = MatrixCompletion(rank=1, max_iter=3, dtype="float64", **options).fit_share(
            *ratings(group)
        )
        found.append(torch.from_numpy(model.predict(PAIRS)))
    mine = slice(len(y) * group.rank // group.size, len(y) * (group.rank + 1) // group.size)
    for options in ({}, {"inference": "point", "ridge": 0.5}):
        subspace = SubspaceRegressor(rank=1, max_iter=3, **options).fit_share(
            X[mine], y[mine], task[mine]
        )
        found.append(torch.from_numpy(np.asarray(subspace.coef_)))
    return found


def test_models_of_rank_one_are_those_of_one_process(tmp_path: Path) -> None:
    ranks = on_ranks(2, tmp_path, of_rank_one)
    same_bits(ranks)
    compare(on_ranks(1, tmp_path, of_rank_one)[0], ranks[0], rtol=1e-7, atol=1e-8)


class _Stopped(Exception):
    """In place of a kill."""


def stopped_after(passes: int, model: Any, share: Any, place: Path) -> None:
    """A fit of which nothing is left but its checkpoint."""
    save, count = FitCheckpoint.save, itertools.count(1)

    def save_and_stop(self: FitCheckpoint, *state: Any) -> None:
        save(self, *state)
        if next(count) == passes:
            raise _Stopped

    FitCheckpoint.save = save_and_stop  # type: ignore[method-assign]
    with contextlib.suppress(_Stopped):
        model.fit_share(*share, checkpoint=place)
    FitCheckpoint.save = save  # type: ignore[method-assign]


def said(call: Any) -> list[str]:
    try:
        call()
    except (ValueError, TypeError, OSError) as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def checkpoints_of_other_fits(folder: str) -> dict[str, list[str]]:
    """Among them the same pairs with values of the same mean and spread, as another column of one file may have."""
    group = Group()
    pairs, values = ratings(group)
    everywhere = VALUES[PAIRS[:, 0], PAIRS[:, 1]]
    other = np.random.default_rng(1).permutation(everywhere)
    start = int(group.gather(torch.tensor([len(values)]))[: group.rank].sum())
    theirs, place = other[start : start + len(values)], Path(folder) / "c"
    stopped_after(4, MatrixCompletion(**SMALL), (pairs, values), place)

    def go_on(pairs: Any, values: Any, **options: Any) -> list[str]:
        return said(
            lambda: MatrixCompletion(**SMALL | options).fit_share(pairs, values, checkpoint=place)
        )

    return {
        "values": go_on(pairs, theirs),
        "ids": go_on(pairs + 100, values),
        "seed": go_on(pairs, values, random_state=1),
        "same": go_on(pairs, values),
    }


def test_a_checkpoint_of_other_data_or_options_is_refused(tmp_path: Path) -> None:
    ranks = on_ranks(2, tmp_path, checkpoints_of_other_fits, str(tmp_path))
    assert ranks[0] == ranks[1]
    assert ranks[0].pop("same") == ["nothing", ""]
    for name, part in (("values", "data"), ("ids", "data"), ("seed", "seed")):
        kind, sentence = ranks[0][name]
        assert kind == "ValueError"
        assert f"belongs to another fit, it differs in {part}; remove the file" in sentence


def keep(folder: str) -> None:
    stopped_after(2, MatrixCompletion(**SMALL), ratings(Group()), Path(folder) / "c")


def go_on(folder: str) -> list[str]:
    return said(
        lambda: MatrixCompletion(**SMALL).fit_share(
            *ratings(Group()), checkpoint=Path(folder) / "c"
        )
    )


def test_another_number_of_processes_goes_on(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, keep, str(tmp_path))
    ranks = on_ranks(3, tmp_path, go_on, str(tmp_path))
    assert ranks == [["nothing", ""]] * 3


def unlike_options(folder: str) -> dict[str, list[str]]:
    """What every process answers where they were not given the same."""
    group, (X, y, task) = Group(), rows()
    pairs, values = ratings(group)
    frame = pl.DataFrame(X, schema=list("abcde"))
    first = group.is_first
    found = {}

    def completion(name: str, **options: Any) -> None:
        kept = {"checkpoint": options.pop("checkpoint", None)}
        model = MatrixCompletion(**{"rank": 2, "max_iter": 3} | options)
        found[name] = said(lambda: model.fit_share(pairs, values, **kept))

    def subspace(name: str, *share: Any, **options: Any) -> None:
        found[name] = said(
            lambda: SubspaceRegressor(**{"rank": 2, "max_iter": 3} | options).fit_share(*share)
        )

    completion("passes", max_iter=3 + group.rank, tol=0.0)
    completion("rank", rank=2 + group.rank)
    completion("dtype", dtype="float32" if first else "float64")
    completion("inference", inference="variational" if first else "point")
    completion("no option", rank=2 if first else -1)
    completion("checkpoint", checkpoint=Path(folder) / "c" if first else None)
    completion(
        "alike",
        tol=0 if first else 0.0,
        verbose=False,
        random_state=group.rank,
        n_jobs=1 if first else None,
    )
    subspace("seed", X, y, task, random_state=group.rank)
    subspace("subspace no option", X, y, task, noise="task" if first else "none")
    subspace("order", frame if first else frame.select(list("edcba")), y, task)
    subspace("names", frame if first else X, y, task)
    subspace("weights", X, y, task, np.ones(len(y)) if group.rank else None)
    subspace("one row", *((X[:1], y[:1], task[:1]) if first else ()))
    subspace("subspace alike", X, y, task)
    return found


def test_ranks_that_were_not_given_the_same_end_with_one_sentence(tmp_path: Path) -> None:
    ranks = on_ranks(2, tmp_path, unlike_options, str(tmp_path))
    assert ranks[0] == ranks[1]
    same = "all ranks must be given the same options: "
    features = "all ranks must have the same features in one order: rank 0 has ['a', 'b', 'c', 'd', 'e'], rank 1 has "
    expected = {
        "passes": f"{same}max_iter is 3 on rank 0 and 4 on rank 1",
        "rank": f"{same}rank is 2 on rank 0 and 3 on rank 1",
        "dtype": f"{same}dtype is float32 on rank 0 and float64 on rank 1",
        "inference": f"{same}inference is variational on rank 0 and point on rank 1",
        "no option": "rank 1: rank must be a whole number of at least 1, got -1",
        "checkpoint": f"{same}checkpoint is a file on rank 0 and None on rank 1",
        "alike": "",
        "seed": f"{same}random_state is 0 on rank 0 and 1 on rank 1",
        "subspace no option": "rank 1: noise must be one of task, shared, got 'none'",
        "order": f"{features}['e', 'd', 'c', 'b', 'a']",
        "names": f"{features}5",
        "weights": "sample_weight must be given on all ranks or on none: ranks 0 and 1 differ",
        "one row": "there are fewer than 2 rows on all ranks",
        "subspace alike": "",
    }
    assert {name: sentence for name, (_, sentence) in ranks[0].items()} == expected


def repeated_pairs() -> list[list[str]]:
    """One pair twice, on the last rank, in a table and in its transpose; the sides are shared out the other way."""
    group, found = Group(), []
    pairs, values = ratings(group)
    names = np.array([[f"u{row}", f"i{column}"] for row, column in pairs], dtype=object)
    if group.rank == group.size - 1:
        names, values = np.concatenate([names, names[-1:]]), np.append(values, 9.0)
    for given in (names, names[:, ::-1]):
        found.append(
            said(lambda g=given: MatrixCompletion(rank=2, duplicates="error").fit_share(g, values))
        )
    return found


def test_a_repeated_pair_is_named_by_its_ids_on_all_ranks(tmp_path: Path) -> None:
    ranks = on_ranks(2, tmp_path, repeated_pairs)
    assert ranks[0] == ranks[1]
    pair = [f"u{PAIRS[-1][0]}", f"i{PAIRS[-1][1]}"]
    for (kind, sentence), (row, column) in zip(ranks[0], (pair, pair[::-1]), strict=True):
        assert kind == "ValueError"
        assert (
            f"1 entry repeats a pair that was given before, the first is row {row!r}, column {column!r};"
            in sentence
        )


def watching() -> int:
    """How many threads look after other processes when all fits are done; their models are kept."""
    group = Group()
    models = [MatrixCompletion(rank=2, max_iter=1).fit_share(*ratings(group)) for _ in range(4)]
    group.sum(torch.zeros(len(models)))
    del group
    threads = [thread for thread in threading.enumerate() if thread.name == "fisherfold-watch"]
    for thread in threads:
        thread.join(5)
    return sum(thread.is_alive() for thread in threads)


def test_nobody_is_watched_after_the_fit(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, watching) == [0, 0]


def odd_ids() -> dict[str, Any]:
    """Ids of two kinds, one on each of two ranks."""
    group, found = Group(), {}
    pairs, values = ratings(group)
    numbers = pairs.astype(np.int64)
    names = np.array([[f"u{row}\udce9", f"i{column}"] for row, column in pairs], dtype=object)
    large = pairs.astype(np.uint64) + np.uint64(2**63)
    cases = {
        "unsigned": (numbers, large),
        "names": (names, large),
    }
    for name, shares in cases.items():
        model = MatrixCompletion(rank=2, max_iter=2, dtype="float64")
        told = said(lambda m=model, s=shares[group.rank]: m.fit_share(s, values))
        ids = (
            []
            if told[1]
            else [ascii(label) for label in model.model_.row_ids.labels[[0, -1]].tolist()]
        )
        found[name] = [told, ids]
    return found


def test_ids_of_two_kinds_are_brought_to_one_or_refused(tmp_path: Path) -> None:
    ranks = on_ranks(2, tmp_path, odd_ids)
    assert ranks[0] == ranks[1]
    last = str(2**63 + int(PAIRS[-1][0]))
    assert ranks[0]["unsigned"] == [["nothing", ""], ["'0'", repr(last)]]
    assert ranks[0]["names"] == [["nothing", ""], [ascii(f"u{PAIRS[0][0]}\udce9"), repr(last)]]


def joined_again() -> list[str]:
    os.environ |= {
        "RANK": str(distributed.get_rank()),
        "WORLD_SIZE": str(distributed.get_world_size()),
    }
    return said(lambda: contextlib.ExitStack().enter_context(joined()))


def test_a_group_that_exists_is_not_joined_again(tmp_path: Path) -> None:
    ranks = on_ranks(2, tmp_path, joined_again)
    assert ranks[0] == ranks[1]
    assert (
        "torch.distributed is initialised already: share the fit as it is, without joined()"
        in ranks[0][1]
    )


def inherit(monkeypatch: pytest.MonkeyPatch, rank: int, port: int) -> None:
    place = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for name, value in place.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_inherits_a_rank_and_is_alone_says_so(
    rank: int, monkeypatch, capsys
) -> None:
    sentence = rf"^rank {rank} of 2 has not met the others at 127\.0\.0\.1:\d+ within 1 s .*take RANK and WORLD_SIZE"
    monkeypatch.setattr("fisherfold.distributed.launch._PATIENCE", 0.2)
    with socket.socket() as held:  # nobody else can answer there
        held.bind(("127.0.0.1", 0))
        inherit(monkeypatch, rank, 0 if rank == 0 else held.getsockname()[1])
        with pytest.raises(RankLost, match=sentence):
            contextlib.ExitStack().enter_context(joined(1.0))
    assert re.search(
        r"after 0 s, and waits on; .*take RANK and WORLD_SIZE", capsys.readouterr().err
    )


@pytest.mark.parametrize("words", ["complete fit x.csv", "subspace fit x.csv --target y --task t"])
def test_the_command_line_waits_as_long_as_it_is_told(
    words: str, tmp_path: Path, monkeypatch
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        inherit(monkeypatch, 1, held.getsockname()[1])
        answer = CliRunner().invoke(
            app, [*words.split(), "-o", str(tmp_path / "m"), "--timeout", "1"]
        )
    assert isinstance(answer.exception, RankLost)
    assert "rank 1 of 2 has not met the others" in str(answer.exception)
    assert "within 1 s" in str(answer.exception)


def broken_files(folder: str) -> list[list[str]]:
    """A Parquet file that is damaged where only one rank reads it, and copies of a file that differ between hosts."""
    damaged, copy = (
        Path(folder) / "damaged.parquet",
        Path(folder) / f"host{distributed.get_rank()}.csv",
    )
    return [
        said(lambda p=path: MatrixCompletion(rank=2).fit_file_share(p)) for path in (damaged, copy)
    ]


def test_a_file_that_one_rank_cannot_read_or_has_another_copy_of_ends_all(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=4000)
    frame = pl.DataFrame(
        {"row": np.arange(4000) % 50, "column": np.arange(4000) % 31, "value": values}
    )
    frame.write_parquet(tmp_path / "damaged.parquet", row_group_size=1000, compression="zstd")
    content = bytearray((tmp_path / "damaged.parquet").read_bytes())
    middle = len(content) * 7 // 10
    content[middle : middle + 2000] = bytes(2000)
    (tmp_path / "damaged.parquet").write_bytes(content)
    frame.write_csv(tmp_path / "host0.csv")
    frame[::-1].write_csv(tmp_path / "host1.csv")
    ranks = on_ranks(2, tmp_path, broken_files, str(tmp_path))
    assert ranks[0] == ranks[1]
    (kind, damaged), (other_kind, copies) = ranks[0]
    assert (kind, other_kind) == ("ValueError", "ValueError")
    assert damaged.startswith(f"rank 1: {tmp_path / 'damaged.parquet'} cannot be read as Parquet: ")
    names = [f"{tmp_path / f'host{rank}.csv'} of rank {rank}" for rank in (0, 1)]
    assert copies == f"all ranks must read the same file: {' and '.join(names)} differ"
