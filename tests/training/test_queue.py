"""The queue of runs: what a plan may say, what is skipped, chosen, survived and written down."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fisherfold.datasets import Images
from fisherfold.files import claimed
from fisherfold.reproduce.cifar import cells
from fisherfold.reproduce.cifar.claims import spreads_of
from fisherfold.training import ImagePool, RunLog, read_logs, settings
from fisherfold.training import queue as queue_module
from fisherfold.training.choices import Choices
from fisherfold.training.log import CHOICES
from fisherfold.training.plan import PAPER_ROUNDS, Entry, default_plan, grid_plan, paper_grid, read_plan
from fisherfold.training.queue import Queue, Tally
from fisherfold.training.run import Run

TASK: dict[str, Any] = {"dataset": "cifar10", "model": "wrn10_1", "preset": "sgd", "batch": 16, "epochs": 1}


def load(dataset: str, *, device: Any, split: str, images: int | None) -> ImagePool:
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 10, 64)
    # a class is a colour, so that a few steps learn something and rates can be told apart
    colours = draw.integers(0, 256, (10, 3))
    pixels = np.clip(colours[labels][:, None, None] + draw.integers(-30, 30, (64, 8, 8, 3)), 0, 255).astype(np.uint8)
    return ImagePool.of(Images(pixels, labels, pixels[:32], labels[:32]), dataset, device=device, split=split)


def queue(folder: Path, say: Callable[[str], None] = lambda _: None, **options: Any) -> Queue:
    given = {"minutes": 10.0, "width": 2, **options}
    return Queue(folder, device=torch.device("cpu"), load=load, say=say, **given)


def entries(*changes: dict[str, Any]) -> list[Entry]:
    return [Entry.of({**TASK, **change}) for change in changes]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.jsonl"))


def test_runs_that_have_ended_are_not_trained_again(tmp_path: Path) -> None:
    plan = entries({"seed": 0}, {"seed": 1}, {"seed": 0, "preset": "mkfac", "refresh_batches": 2})
    assert queue(tmp_path).work(lambda: plan)
    assert len(names(tmp_path)) == 3
    assert all(RunLog.read(path).ended == "done" for path in tmp_path.glob("*.jsonl"))
    stamps = [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("*.jsonl"))]
    assert queue(tmp_path).work(lambda: plan)
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("*.jsonl"))] == stamps


def test_what_time_cut_off_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    plan, lines = entries({"epochs": 3}), []
    first = queue(tmp_path, lines.append)
    tell = queue_module.train_side_by_side

    def until_now(jobs: Any, **options: Any) -> bool:
        first.until = 0.0
        return tell(jobs, **{**options, "until": 0.0})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue_module, "train_side_by_side", until_now)
        assert not first.work(lambda: plan)
    assert lines[-1] == "the time is up; the same command goes on"
    assert list(tmp_path.glob("*.safetensors"))
    assert queue(tmp_path).work(lambda: plan)
    assert [e["epoch"] for e in RunLog.read(next(tmp_path.glob("*.jsonl"))).epochs] == [1, 2, 3]
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_run_that_fails_is_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, lines = queue_module.Run.step, []

    def failing(self: Any, index: int) -> None:
        if self.seed == 1:
            raise RuntimeError("out of memory\nand more")
        step(self, index)

    monkeypatch.setattr(queue_module.Run, "step", failing)
    work = queue(tmp_path, lines.append)
    assert work.work(lambda: entries({"seed": 0}, {"seed": 1}, {"seed": 2}))
    assert [name[-7] for name in names(tmp_path)] == ["0", "2"]
    assert lines[0] == "2 runs failed side by side (RuntimeError: out of memory); now one by one"
    assert sum("seed1 failed and is left out: RuntimeError: out of memory" in line for line in lines) == 1


def test_a_damaged_log_does_not_hold_up_the_other_runs(tmp_path: Path) -> None:
    plan, lines = entries({"seed": 0}, {"seed": 1}), []
    work = queue(tmp_path, lines.append)
    damaged = work._path(plan[0])
    damaged.write_text('{"format": "fisherf')
    assert work.work(lambda: plan)
    assert sum("seed0 is left out: " in line and "is no log of a training run" in line for line in lines) == 1
    assert RunLog.read(work._path(plan[1])).ended == "done"
    assert damaged.read_text() == '{"format": "fisherf'


def test_a_log_of_another_run_is_not_taken_for_one_of_the_plan(tmp_path: Path) -> None:
    plan, lines = entries({"seed": 0}, {"seed": 1}), []
    work = queue(tmp_path, lines.append)
    assert work.work(lambda: plan)
    work._path(plan[1]).replace(work._path(plan[0]))
    assert queue(tmp_path, lines.append).work(lambda: plan)
    assert sum("seed0 is left out: " in line and "its seed is 1, this one's is 0" in line for line in lines) == 1
    assert RunLog.read(work._path(plan[1])).ended == "done"


def test_a_whole_number_in_a_plan_is_the_same_setting_as_the_number_with_a_point(tmp_path: Path) -> None:
    plan, work = entries({"lr": 1, "weight_decay": 0}, {"lr": 1.0, "weight_decay": 0.0}), queue(tmp_path)
    first, second = (work._path(entry) for entry in plan)
    assert first == second
    assert first.name == "cifar10-wrn10_1-sgd-lr=1.0-weight_decay=0.0-epochs=1-batch=16-seed0.jsonl"


def test_a_plan_may_change_while_it_is_worked_through(tmp_path: Path) -> None:
    plan, lines = tmp_path / "plan.jsonl", []
    written = [json.dumps({**TASK, "seed": seed}) for seed in range(3)]
    plan.write_text("\n".join(written[:2]))

    def say(line: str) -> None:
        lines.append(line)
        if "seed0" in line:  # a half-written file, then one run more
            plan.write_text(written[0][:20])
        elif "going on with the plan as it was" in line:
            plan.write_text("\n\n".join([*written, ""]))

    assert queue(tmp_path / "runs", say, width=1).work(lambda: read_plan(plan))
    assert any(line.startswith("going on with the plan as it was: ") and "line 1" in line for line in lines)
    assert len(names(tmp_path / "runs")) == 3


def test_a_search_keeps_the_better_third_and_trains_the_best(tmp_path: Path) -> None:
    rates = [{"lr": rate} for rate in (0.0, 1e-9, 0.05, 1e30)]
    search = {"candidates": [rates, [{"momentum": 0.9}, {"momentum": 0.0}]], "rounds": [1, 2]}
    plan = entries({**search, "epochs": 2, "batch": 8})
    work = queue(tmp_path)
    assert work.work(lambda: plan)
    record = json.loads((tmp_path / "search" / CHOICES).read_text())
    trials = [(t["candidate"], t["epochs"], t["accuracy"]) for t in record["tried"]]
    tried = {(c["lr"], c.get("momentum"), epochs): accuracy for c, epochs, accuracy in trials}
    first = {rate: tried[rate, None, 1] for rate in (0.0, 1e-9, 0.05, 1e30)}
    assert first[1e30] == 0.0  # diverged
    second = {key[0] for key in tried if key[1:] == (None, 2)}
    assert second == set(sorted(first, key=lambda rate: -first[rate])[:2])
    chosen = record["chosen"]
    assert chosen["lr"] == max(second, key=lambda rate: tried[rate, None, 2])
    assert tried[chosen["lr"], chosen.get("momentum"), 2] == max(v for k, v in tried.items() if k[2] == 2)
    assert record["commit"]
    assert all("validation" in name for name in names(tmp_path / "search") if name != CHOICES)
    log = RunLog.read(next(tmp_path.glob("*.jsonl")))
    assert {key: log.header["settings"][key] for key in chosen} == chosen
    assert log.header["split"] == "test"
    before = (tmp_path / "search" / CHOICES).read_text()
    assert queue(tmp_path).work(lambda: [Entry.of({**TASK, **search, "epochs": 2, "batch": 8, "seed": 1})])
    assert (tmp_path / "search" / CHOICES).read_text() == before  # another seed asks the same question
    assert len(names(tmp_path)) == 2


def test_a_later_list_of_candidates_takes_nothing_away(tmp_path: Path) -> None:
    search = {"candidates": [[{"lr": 0.05}, {"lr": 0.0}], [{"momentum": 0.0, "lr": 0.0}, {"lr": 1e30}]], "rounds": [2]}
    assert queue(tmp_path).work(lambda: entries({**search, "epochs": 2, "batch": 8}))
    record = json.loads((tmp_path / "search" / CHOICES).read_text())
    scores = [trial["accuracy"] for trial in record["tried"]]
    assert max(scores[2:]) < scores[0] == max(scores)
    assert record["chosen"] == {"lr": 0.05}


def test_a_search_that_ends_as_its_best_trial_needs_no_more_than_its_record(tmp_path: Path) -> None:
    search = {"candidates": [{"lr": 0.05}, {"lr": 0.0}], "rounds": [1, 2], "split": "validation"}
    plan = entries({**search, "epochs": 2})
    assert queue(tmp_path).work(lambda: plan)
    record, logs = tmp_path / "search" / CHOICES, names(tmp_path / "search")
    assert len(logs) == 1 + 3
    for name in logs:
        if name != CHOICES:
            (tmp_path / "search" / name).unlink()
    before = record.read_text()
    assert queue(tmp_path).work(lambda: plan)
    assert (record.read_text(), names(tmp_path / "search"), names(tmp_path)) == (before, [CHOICES], [])


def test_a_damaged_record_of_choices_is_named_and_ends_no_run_in_training(tmp_path: Path) -> None:
    search = {"candidates": [{"lr": 0.01}, {"lr": 0.02}], "rounds": [1]}
    plan, more, lines = entries({"epochs": 2}), entries({"epochs": 2}, search), []
    record, looks = tmp_path / "search" / CHOICES, 0

    def asked() -> list[Entry]:
        nonlocal looks
        looks += 1
        if looks == 2:  # after the first epoch
            record.write_text('{"dataset": "cif')
        return plan if looks == 1 else more

    with pytest.raises(ValueError, match=r"chosen\.jsonl holds a line that is no record of a choice: Unterminated"):
        queue(tmp_path, lines.append).work(asked)
    assert RunLog.read(next(tmp_path.glob("*.jsonl"))).ended == "done"
    assert lines[0].startswith("going on with the runs as they were: ")
    assert not any("failed" in line for line in lines)


def test_a_choice_is_the_one_that_was_recorded(tmp_path: Path) -> None:
    plan = entries({"candidates": [{"lr": 0.01}, {"lr": 0.02}], "rounds": [1]})
    (tmp_path / "search").mkdir()
    question = {"dataset": "cifar10", "model": "wrn10_1", "preset": "sgd", "changes": {"batch": 16, "epochs": 1}}
    record = {**question, "candidates": [[{"lr": 0.01}, {"lr": 0.02}]], "rounds": [1], "chosen": {"lr": 0.02}}
    (tmp_path / "search" / CHOICES).write_text(json.dumps(record) + "\n")
    assert queue(tmp_path).work(lambda: plan)
    assert names(tmp_path / "search") == [CHOICES]
    assert RunLog.read(next(tmp_path.glob("*.jsonl"))).header["settings"]["lr"] == 0.02


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"dataset": "cifar10", "model": "vgg16bn"}', "'preset' is missing"),
        ('{"dataset": "cifar10", "model": "vgg16bn", "preset": "sdg"}', "preset must be one of sgd, sgd-tuned"),
        ('{"dataset": "cifar11", "model": "vgg16bn", "preset": "sgd"}', "dataset must be cifar10 or cifar100"),
        ('{"dataset": "cifar10", "model": "vgg16bn", "preset": "sgd", "rate": 1}', "'rate' is no setting; there are"),
        ('{"dataset": "cifar10", "model": "vgg16bn", "preset": "sgd", "epochs": 0}', "epochs must be at least 1"),
        ('{"dataset": "cifar10", "model": "vgg16bn", "preset": "sgd", "split": "all"}', "split must be 'test' or"),
        ('{"dataset": "cifar10", "model": "vgg16bn", "preset": "sgd", "candidates": [1]}', "must be a list of objects"),
        ('{"dataset": "cifar10", "model": "vgg16bn", "preset": "sgd", "rounds": []}', "rounds must be numbers of"),
        ('{"dataset": "cifar10", "model": "vgg16bn", "preset": "sgd", "rounds": [true]}', "rounds must be numbers of"),
        ('{"dataset": "cifar10", "model": "vgg16bn", "preset": "sgd", "seed": true}', "seed must be a whole number"),
        ('{"dataset": "cifar10", "model": "vgg16bn", "preset": "sgd", "split": ["test"]}', "split must be 'test' or"),
        ('{"dataset": "cifar10", "model": "vgg16bn", "preset": "sgd", "candidates": [{"epochs": 3}]}', "in epochs"),
        ('{"dataset": "cifar10", "model": "vgg16bn", "preset": "sgdg", "balanced": "false"}', "must be of type bool"),
        ('["sgd"]', "an entry is an object"),
        ("{", "Expecting property name"),
    ],
)
def test_a_wrong_line_of_a_plan_is_named(line: str, message: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.jsonl"
    plan.write_text(json.dumps(TASK) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"plan\.jsonl, line 2: ") as found:
        read_plan(plan)
    assert message in str(found.value)


def test_a_run_that_is_taken_out_of_the_plan_is_left_after_its_epoch(tmp_path: Path) -> None:
    """Its neighbour goes on; put back, it goes on from its checkpoint."""
    plan, lines = entries({"seed": 0, "epochs": 3}, {"seed": 1, "epochs": 3}), []
    looks = 0

    def asked() -> list[Entry]:
        nonlocal looks
        looks += 1
        return plan if looks == 1 else plan[:1]

    assert queue(tmp_path, lines.append).work(asked)
    logs = {path.stem[-1]: RunLog.read(path) for path in tmp_path.glob("*.jsonl")}
    assert (logs["0"].ended, len(logs["0"].epochs)) == ("done", 3)
    assert (logs["1"].ended, len(logs["1"].epochs)) == ("", 1)
    assert "cut off" in lines[1]
    assert [path.stem[-1] for path in tmp_path.glob("*.safetensors")] == ["1"]
    assert queue(tmp_path).work(lambda: plan)
    assert [e["epoch"] for e in RunLog.read(next(tmp_path.glob("*seed1.jsonl"))).epochs] == [1, 2, 3]


def test_nothing_begins_beside_others_that_would_not_end_in_time(tmp_path: Path) -> None:
    """Alone, it would: what is done of it is kept."""
    first, long, other = entries({}, {"epochs": 100_000}, {"preset": "adam", "epochs": 2})
    unseen = entries({"preset": "kfac", "epochs": 100_000})[0]
    tally, lines = Tally(), []
    at_work = queue(tmp_path, lines.append, tally=tally, width=1)
    assert at_work.work(lambda: [first])
    with tally.with_mine(1):
        at_work.until = queue_module.time.monotonic() + 20.0
        assert not at_work._ends_in_time(long)
        assert not at_work._ends_in_time(unseen)
        looks = []

        def plan() -> list[Entry]:
            looks.append(len(names(tmp_path)))
            if looks.count(2) == 5:  # the one that ends in time has begun, and ended
                at_work.until = 0.0
            return [long, unseen, other]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(queue_module, "LOOK_AGAIN", 0.01)
            assert not at_work.work(plan)
    assert [RunLog.read(path).ended for path in tmp_path.glob("*.jsonl")] == ["done", "done"]
    at_work.until = queue_module.time.monotonic() + 2.0
    assert not at_work.work(lambda: [long])
    assert len(names(tmp_path)) == 3
    assert "cut off" in lines[-3]


def test_the_plan_that_comes_with_the_benchmarks_can_be_read() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "gpu" / "cifar_gap.jsonl"
    if not path.is_file():
        pytest.skip("an installed package has no benchmarks")
    plan = read_plan(path)
    stages = {(entry.dataset, entry.model, entry.preset): entry.stages for entry in plan}
    rivals = {"mkfac-sam": "sgd-sam", "mkfac-cutmix": "sgd-cutmix"}
    pairs = [(stages[key], stages[(*key[:2], rivals[key[2]])]) for key in stages if key[2] in rivals]
    assert len(plan) == len(stages) >= 2 * len(pairs) > 0
    # a rival is searched as long as ours is, or longer, and over the same but for rates
    for ours, theirs in pairs:
        shared = [
            [stage for stage in own if not any(name.startswith(("lr", "manifold")) for c in stage for name in c)]
            for own in (ours, theirs)
        ]
        assert shared[0] == shared[1]
        assert [len(stage) for stage in theirs] == [len(stage) for stage in ours]


def test_presets_have_the_rates_of_the_grids_where_the_longest_trials_put_them_ahead() -> None:
    root = Path(__file__).parents[2]
    if not (root / "benchmarks" / "gpu").is_dir():
        pytest.skip("an installed package has no benchmarks")
    asked, smaller = (
        {(e.dataset, e.model, e.preset): e.stages[0] for e in read_plan(root / "benchmarks" / "gpu" / name)}
        for name in ("cifar_rates.jsonl", "cifar_small_rates.jsonl")
    )
    spreads = spreads_of(cells(root / "results" / "cifar"))
    longest: dict[tuple[str, str, str], dict[str, Any]] = {}
    for record in Choices(root / "results" / "cifar" / "search").records():
        cell, chosen = (record["dataset"], record["model"], record["preset"]), record["chosen"]
        if tuple(record["rounds"]) == PAPER_ROUNDS:
            own = settings(cell[2], *cell[:2])
            longer = asked[cell][1] if cell in asked else {name: getattr(own, name) for name in chosen}
            assert longer == {name: chosen[name] for name in longer}
            continue
        if record["candidates"] == [list(smaller.get(cell, ()))]:  # no rate below those that the grids let through
            assert chosen == smaller[cell][0]
            continue
        assert record["candidates"] == [list(asked[cell])]
        longest[cell] = max(longest.get(cell, record), record, key=lambda each: each["rounds"][-1])
    for cell, record in longest.items():
        usual, chosen = asked[cell][0], record["chosen"]
        score = {json.dumps(each["candidate"]): each["accuracy"] for each in record["tried"]}
        ahead = score[json.dumps(chosen)] - score[json.dumps(usual)] > spreads[cell[0]].margin(1, 1)
        assert settings(cell[2], *cell[:2], **(chosen if ahead else usual)) == settings(cell[2], *cell[:2])


def test_missing_plans_and_no_time_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no plan"):
        read_plan(tmp_path / "plan.jsonl")
    with pytest.raises(ValueError, match="minutes and width must be positive, got 0 and 3"):
        Queue(tmp_path, device=torch.device("cpu"), minutes=0)


def test_the_default_plan_has_every_cell_once_per_seed_in_the_order_of_importance() -> None:
    plan = default_plan(2)
    cells = [(e.dataset, e.model, e.preset) for e in plan]
    half = len(plan) // 2
    assert len(set(cells)) == half == 68
    assert cells[:half] == cells[half:]
    assert cells[:4] == [("cifar10", "vgg16bn", p) for p in ("sgd", "mkfac", "sgdg", "kfac")]
    assert [e.seed for e in plan] == [0] * half + [1] * half
    assert not any(e.stages for e in plan)


def test_the_paper_searches_rates_and_betas_of_its_baselines() -> None:
    plan = grid_plan()
    searched = {e.preset: e.stages for e in plan}
    assert set(searched) == {"sgd", "sgdp", "adam", "adamp", "kfac"}
    assert len({(e.dataset, e.model, e.preset) for e in plan}) == len(plan) == 20
    # nothing is trained but trials: what is chosen is one of them
    last = [e.trial(e.stages[-1][0], e.rounds[-1]) for e in plan]
    assert [e.chosen(e.stages[-1][0]) for e in plan] == last
    rates = [candidate["lr"] for candidate in searched["sgd"][0]]
    assert (rates[0], rates[1], rates[-1], len(rates)) == (0.5, 0.2, 1e-5, 15)
    assert len(searched["adamp"][1]) == 9
    assert paper_grid("mkfac-tuned") == ()


def cooperate(folder: str, tally: Tally) -> None:
    torch.set_num_threads(1)
    search = {"candidates": [{"lr": rate} for rate in (0.01, 0.02, 0.05, 0.07)], "rounds": [1, 2]}
    plan = entries(search, *({"seed": seed, "epochs": 2} for seed in range(4)))
    lines: list[str] = []
    assert queue(Path(folder), lines.append, width=1, tally=tally).work(lambda: plan)
    trained = [line.split()[0] for line in lines if " done " in line]
    Path(folder, f"account-{os.getpid()}.txt").write_text("\n".join(trained))


def test_processes_share_a_plan_and_its_searches_and_do_nothing_twice(tmp_path: Path) -> None:
    tally, context = Tally(), multiprocessing.get_context("forkserver")
    workers = [context.Process(target=cooperate, args=(str(tmp_path), tally)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0]
    trained = [line for path in tmp_path.glob("account-*.txt") for line in path.read_text().splitlines()]
    # four candidates for one epoch and two for two; the choice; four seeds, of which none is the choice
    assert sorted(trained) == sorted(set(trained))
    assert len(trained) == 4 + 2 + 1 + 4
    assert len((tmp_path / "search" / CHOICES).read_text().splitlines()) == 1
    assert not list(tmp_path.rglob("*.claim"))
    assert tally.count == 0


def test_the_time_of_an_epoch_is_shared_with_the_runs_that_are_there(tmp_path: Path) -> None:
    """Not with those that the other processes could have."""
    tally = Tally()
    plan = entries({"seed": 0})
    with tally.with_mine(3):
        assert queue(tmp_path / "busy", tally=tally).work(lambda: plan)
    assert queue(tmp_path / "idle", tally=tally).work(lambda: plan)
    for folder, count in (("busy", 4), ("idle", 1)):
        (log,) = read_logs(tmp_path / folder)
        assert {entry["side_by_side"] for entry in log.epochs} == {count}


def test_what_another_process_holds_is_waited_for_and_taken_over(tmp_path: Path) -> None:
    plan, lines = entries({"seed": 0}, {"seed": 1}), []
    work = queue(tmp_path, lines.append, width=1)
    path = work._path(plan[0])
    claim = path.with_name(f".{path.stem}.claim")
    code = (
        "import sys; from fisherfold.files import claimed\n"
        "with claimed(sys.argv[1]) as mine:\n print(mine, flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(claim)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    with claimed(claim) as mine:
        assert not mine

    def say(line: str) -> None:
        lines.append(line)
        if "seed1" in line:  # the other process dies with its claim
            holder.kill()
            holder.communicate()

    work.say = say
    assert work.work(lambda: plan)
    assert [line.split()[0][-5:] for line in lines if " done " in line] == ["seed1", "seed0"]
    assert not claim.exists()


def test_compiled_code_is_kept_for_runs_that_differ_in_rates_and_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is forgotten before there are too many kinds of networks for the compiler, and after a failure."""
    forgotten: list[int] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: forgotten.append(1))
    work = Queue(tmp_path, device=torch.device("cuda"), minutes=1.0)
    presets = ("sgd", "mkfac")
    alike = entries(*({"seed": s, "lr": 0.1 * (1 + s), "preset": preset} for s in range(9) for preset in presets))
    for entry in alike:
        work._make_room([entry])
    assert not forgotten
    for number, entry in enumerate(entries(*({"dropout": 0.1 * n} for n in range(1, 10)))):
        work._make_room([entry])
        assert len(forgotten) == (number >= queue_module.KINDS_COMPILED - 1)
    monkeypatch.setattr(work, "_job", lambda _entry: 1 / 0)
    work.train(alike[:1])
    assert len(forgotten) == 2


def test_one_graph_serves_all_runs_of_a_network() -> None:
    """What makes a new kind for the compiler: dropout does, optimizers, seeds and refreshes do not."""
    pool, graphs = load("cifar10", device="cpu", split="test", images=None), []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    curved = {"seed": 1, "preset": "mkfac", "refresh_batches": 1}
    seen = []
    for entry in entries({"seed": 0}, curved, {"seed": 2, "preset": "adam"}, {"dropout": 0.3}):
        run = Run(entry.settings(), entry.model, pool, seed=entry.seed)
        run.forward = torch.compile(run.network, dynamic=False, backend=backend)
        run.begin_epoch()
        run.step(0)
        seen.append((queue_module._kind(entry), len(graphs)))
    assert [count for _, count in seen] == [1, 1, 1, 2]
    assert len({kind for kind, _ in seen}) == 2


def test_a_choice_made_without_a_trial_that_failed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, lines = entries({"candidates": [{"lr": 0.0}, {"lr": 0.05}], "rounds": [2], "batch": 8, "epochs": 2}), []
    step = queue_module.Run.step

    def failing(self: Any, index: int) -> None:
        if self.settings.lr:
            raise RuntimeError("out of memory")
        step(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(queue_module.Run, "step", failing)
        assert queue(tmp_path, lines.append, width=1).work(lambda: plan)
    (record,) = [json.loads(line) for line in (tmp_path / "search" / CHOICES).read_text().splitlines()]
    assert [trial["accuracy"] is None for trial in record["tried"]] == [False, True]
    assert record["chosen"] == {"lr": 0.0}
    assert any(line.endswith("chosen {'lr': 0.0} of 2 trials, 1 of which failed") for line in lines)
    assert queue(tmp_path, width=1).work(lambda: plan)
    first, second = [json.loads(line) for line in (tmp_path / "search" / CHOICES).read_text().splitlines()]
    assert first == record
    assert second["chosen"] == {"lr": 0.05}
    assert len(names(tmp_path)) == 2
    assert queue(tmp_path, width=1).work(lambda: plan)
    assert len(names(tmp_path)) == 2  # the newer choice is the one that counts


def test_a_search_of_which_all_trials_failed_chooses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Any, index: int) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(queue_module.Run, "step", failing)
    assert queue(tmp_path).work(lambda: entries({"candidates": [{"lr": 0.0}, {"lr": 0.05}], "rounds": [1]}))
    assert names(tmp_path) == []
    assert names(tmp_path / "search") == []


def test_the_pace_of_a_run_is_known_from_logs_of_others(tmp_path: Path) -> None:
    assert queue(tmp_path).work(lambda: entries({"preset": "sgd"}, {"preset": "sgd", "seed": 1}))
    for path, seconds in zip(sorted(tmp_path.glob("*.jsonl")), (3.0, 5.0), strict=True):
        log = RunLog.read(path)
        log.epochs[0]["seconds"] = seconds
        log.write(path)
    (tmp_path / "damaged.jsonl").write_text("{")
    tally, run = Tally(), entries({"preset": "sgd", "epochs": 10, "seed": 2})[0]
    fresh = queue(tmp_path, tally=tally)
    with tally.with_mine(2):  # and this one: three at once, 4 s each by the median of the two
        fresh.until = queue_module.time.monotonic() + 110
        assert not fresh._ends_in_time(run)
        fresh.until = queue_module.time.monotonic() + 130
        assert fresh._ends_in_time(run)


def test_paces_of_others_are_looked_up_again_after_every_run(tmp_path: Path) -> None:
    at_work = queue(tmp_path)
    assert at_work._pace("wrn10_1", "sgd") == 0.0
    assert queue(tmp_path).work(lambda: entries({"preset": "sgd"}))
    at_work.train(entries({"preset": "adam"}))
    (log,) = [RunLog.read(path) for path in tmp_path.glob("*-sgd-*.jsonl")]
    assert at_work._pace("wrn10_1", "sgd") == log.epochs[0]["seconds"]
