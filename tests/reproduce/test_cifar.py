"""The table of CIFAR accuracies: which runs count, medians over seeds, what is said of the paper's claim."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fisherfold.reproduce import cifar
from fisherfold.reproduce.cifar.claims import GUESSED_DEVIATIONS, spreads_of
from fisherfold.reproduce.reproduce import Options, refresh_page, reproduce_cifar, sections
from fisherfold.training import PRESETS, RunLog, Settings, preset_of, settings
from fisherfold.training.log import CHOICES
from fisherfold.training.train import log_name


def log(
    folder: Path, accuracies: list[float], *, preset: str = "mkfac", seed: int = 0, ended: str = "done",
    dataset: str = "cifar10", model: str = "vgg16bn", split: str = "test", images: int = 50_000,
    **changes: float | str,
) -> None:  # fmt: skip
    header = {
        "dataset": dataset, "model": model, "preset": preset, "seed": seed, "split": split, "images": images,
        "settings": settings(preset, dataset, model, **changes).as_json(), "device": "a <device>",
        "date": "2026-01-02 03:04 UTC",
        "commit": "0123456789abcdef", "command": "x",
    }  # fmt: skip
    entries = [
        {"epoch": i + 1, "accuracy": a, "train_loss": 1.0, "loss": 1.0, "seconds": 0.5}
        for i, a in enumerate(accuracies)
    ]
    folder.mkdir(exist_ok=True)
    name = f"{dataset}-{model}-{preset}-{split}-{images}-{seed}-{ended}-{len(changes)}.jsonl"
    RunLog(header, entries, ended).write(folder / name)


def found(folder: Path, optimizer: str = "mkfac", model: str = "vgg16bn") -> cifar.CellResult:
    return next(c for c in cifar.cells(folder) if (c.dataset, c.model, c.optimizer) == ("cifar10", model, optimizer))


def test_medians_are_over_the_best_and_over_the_last_epochs(tmp_path: Path) -> None:
    for seed, accuracies in enumerate(([90.0, 93.0, 92.0], [94.0, 91.0, 93.5], [90.0, 95.0, 94.5])):
        log(tmp_path, accuracies, seed=seed)
    cell = found(tmp_path)
    assert (cell.best, cell.last) == ((94.0, 93.0, 95.0), (93.5, 92.0, 94.5))
    assert cifar.text(cell) == "94.00 93.00–95.00 (93.50), 3 seeds [94.76]"
    row = cell.as_json()
    assert (row["seeds"], row["best_median"], row["last_median"], row["paper"]) == (3, 94.0, 93.5, 94.76)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"date": "2026-01-02 03:04 UTC", ', "", "date is None in its first line"),
        ('"seed": 0', '"seed": true', "seed is True in its first line"),
        ('"split": "test"', '"split": "train"', "split is 'train' in its first line"),
        ('{"epoch": 2, ', '{"epoch": 3, ', "its epochs are not all there, one after the other"),
        ('"accuracy": 93.0', '"accuracy": null', "of epoch 2 are no numbers"),
        ('"accuracy": 93.0, ', "", "of epoch 2 are no numbers"),
        ('"done"', '"stopped"', "it ended as 'stopped'"),
    ],
)
def test_a_damaged_log_is_named_and_is_in_no_median(tmp_path: Path, old: str, new: str, said: str) -> None:
    log(tmp_path, [90.0, 93.0, 92.0])
    (path,) = tmp_path.iterdir()
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=rf"0-done-0\.jsonl is a damaged log: .*{said}; move it away"):
        cifar.cells(tmp_path)


def test_only_whole_finished_runs_of_a_preset_judged_on_the_test_images_count(tmp_path: Path) -> None:
    log(tmp_path, [99.0], split="validation")
    log(tmp_path, [99.0], images=1000)
    log(tmp_path, [99.0], ended="")
    log(tmp_path, [99.0], lr=0.5)
    log(tmp_path, [99.0], epochs=10, lr_decay=0.5)
    assert cifar.text(found(tmp_path)) == "not run [94.76]"
    log(tmp_path, [50.0, 10.0], ended="diverged")
    cell = found(tmp_path)
    assert cell.best[0] == 50.0
    assert cell.as_json()["last_median"] is None
    assert cifar.text(cell) == "50.00 (diverged), 1 seed [94.76]"


def test_a_seed_that_was_run_twice_counts_once(tmp_path: Path) -> None:
    """As where settings were tried before they became a preset; the older run counts, the other one is shown."""
    own = {"momentum": settings("mkfac", "cifar10", "vgg16bn").momentum}
    log(tmp_path, [90.0])
    log(tmp_path, [96.0], **own)
    log(tmp_path, [93.0], seed=1)
    for path in tmp_path.glob("*-1.jsonl"):
        written = RunLog.read(path)
        written.header["date"] = "2025-12-31 23:59 UTC"
        written.write(path)
    cell = found(tmp_path)
    assert (cell.best, cifar.text(cell)) == ((94.5, 93.0, 96.0), "94.50 93.00–96.00 (94.50), 2 seeds [94.76]")
    assert [row[5] for row in cifar.trials(tmp_path).rows] == [90.0]


def test_a_log_older_than_a_setting_counts_only_where_the_preset_has_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log(tmp_path, [90.0])
    path = next(tmp_path.glob("*.jsonl"))
    written = RunLog.read(path)
    del written.header["settings"]["refresh_every"]
    written.write(path)
    assert found(tmp_path).best[0] == 90.0
    paper = PRESETS["mkfac"]
    monkeypatch.setitem(PRESETS, "mkfac", lambda task: replace(paper(task), refresh_every=5))
    assert not found(tmp_path).runs


def test_a_run_counts_for_the_preset_that_has_its_settings_now(tmp_path: Path) -> None:
    """Settings are tried under the name of the preset from which they depart, before they become one."""
    sam = settings("mkfac-sam", "cifar10", "vgg16bn").as_json()
    before = settings("mkfac-averaged", "cifar10", "vgg16bn").as_json()
    changes = {key: value for key, value in sam.items() if key != "preset" and before[key] != value}
    log(tmp_path, [94.0], preset="mkfac-averaged", **changes)
    assert found(tmp_path, "mkfac-sam").best[0] == 94.0
    assert not found(tmp_path, "mkfac-averaged").runs
    assert not cifar.trials(tmp_path).rows
    chosen = settings("mkfac-averaged", "cifar10", "vgg16bn", **changes)
    assert log_name("cifar10", "vgg16bn", chosen, 0, "test", None) == "cifar10-vgg16bn-mkfac-sam-seed0.jsonl"
    path = next(tmp_path.glob("*.jsonl"))
    written = RunLog.read(path)
    written.header["settings"]["from_the_future"] = 1.0
    written.write(path)
    assert not found(tmp_path, "mkfac-sam").runs


def test_verdicts_compare_with_what_was_run_and_with_the_paper(tmp_path: Path) -> None:
    log(tmp_path, [94.0])
    assert cifar.judge(cifar.cells(tmp_path))[0] == "not run"
    log(tmp_path, [93.0], preset="sgd")
    verdict, why = cifar.judge(cifar.cells(tmp_path))
    assert verdict == "holds partly"
    assert why[1] == (
        "CIFAR-10 VGG16-BN: MKFAC 94.00 is above the best of 1 rival, SGD 93.00; the paper has 94.76 and 92.88."
    )
    log(tmp_path, [94.1], preset="kfac")
    verdict, why = cifar.judge(cifar.cells(tmp_path))
    assert verdict == "does not hold"
    assert "is within noise of the best of 2 rivals, KFAC 94.10" in why[1]
    assert why[::3] == [
        "CIFAR-10 WRN-16-4: not enough was run to judge.", "CIFAR-100 VGG16-BN: not enough was run to judge."
    ]  # fmt: skip
    small, large = cifar.margins(cifar.cells(tmp_path))[:2]
    assert "(a guess: too few were run); single runs closer than 0.42" in small
    assert "(a guess: too few were run); single runs closer than 0.71" in large


def test_guesses_of_the_noise_are_those_of_the_recorded_runs() -> None:
    folder = Path(__file__).parents[2] / "results" / "cifar"
    if not folder.is_dir():
        pytest.skip("an installed package has no results folder")
    for dataset, spread in spreads_of(cifar.cells(folder)).items():
        assert spread.freedom > 40
        assert spread.deviation == pytest.approx(GUESSED_DEVIATIONS[dataset], rel=0.2)


def test_rows_that_contradict_the_paper_are_named_in_words(tmp_path: Path) -> None:
    assert cifar.against_paper(cifar.cells(tmp_path)) == []
    log(tmp_path, [94.0], preset="adamp")  # 91.43 in the paper
    log(tmp_path, [92.4], preset="adamp", model="wrn16_4")  # 92.55
    log(tmp_path, [75.0], preset="kfac", dataset="cifar100")  # 76.38
    log(tmp_path, [99.0], preset="sgd-tuned")  # not in the paper
    found = cifar.cells(tmp_path)
    assert cifar.against_paper(found) == [
        "AdamP: above the paper on CIFAR-10 VGG16-BN (+2.57); within noise of the paper on CIFAR-10 WRN-16-4 (-0.15).",
        "KFAC: below the paper on CIFAR-100 VGG16-BN (-1.38).",
    ]
    notes = cifar.section(found, cifar.beside(tmp_path), command="x").notes
    assert set(cifar.against_paper(found)) < set(notes)
    assert cifar.margins(found)[2].startswith("Each margin is that of one comparison: of twenty pairs")


def gaps(folder: Path) -> dict[tuple[str, str], str]:
    """What stands in the column of CIFAR-10 with VGG16-BN."""
    shown = cifar.comparisons(cifar.cells(folder))
    column = shown.columns.index("CIFAR-10 VGG16-BN")
    assert all(cell == "" for row in shown.rows for cell in (*row[2:column], *row[column + 1 :]))
    return {(str(row[0]), str(row[1])): str(row[column]) for row in shown.rows}


def test_our_own_settings_are_compared_with_sgd_and_with_the_paper(tmp_path: Path) -> None:
    log(tmp_path, [94.0])
    assert set(gaps(tmp_path).values()) == {""}
    log(tmp_path, [94.5], preset="mkfac-tuned")
    log(tmp_path, [94.0], preset="sgd-tuned")
    balanced, tuned = "MKFAC, balanced turning", "SGD, tuned weight decay"
    best = "the best of these", "MKFAC of the paper"
    assert gaps(tmp_path)[balanced, tuned] == "+0.50"
    assert gaps(tmp_path)[best] == "(-0.26)"
    log(tmp_path, [94.6], preset="sgd-tuned", seed=1)
    log(tmp_path, [94.6], preset="sgd-tuned", seed=2)
    assert gaps(tmp_path)[balanced, tuned] == "(-0.10)"
    log(tmp_path, [95.2], preset="mkfac-averaged")
    log(tmp_path, [95.7], preset="sgd-averaged")
    assert {pair: gap for pair, gap in gaps(tmp_path).items() if gap} == {
        (balanced, tuned): "(-0.10)",
        (f"{balanced}, averaged", tuned): "+0.60",
        (f"{balanced}, averaged", f"{tuned}, averaged"): "-0.50",
        best: "+0.44",
    }


def test_what_is_noise_is_told_by_the_seeds(tmp_path: Path) -> None:
    """The same two accuracies differ where seeds are alike, and do not where they are not."""
    for deviation, word in ((0.01, "above"), (1.0, "within noise of")):
        folder = tmp_path / word
        log(folder, [94.0])
        log(folder, [93.0], preset="sgd")
        for preset in ("adam", "adamp", "sgdp", "sgdg", "mkfac-sam"):
            log(folder, [92.0 - deviation], preset=preset)
            log(folder, [92.0 + deviation], preset=preset, seed=1)
        found = cifar.cells(folder)
        assert f"MKFAC 94.00 is {word} the best of" in cifar.judge(found)[1][1]
        assert f"deviation of {2**0.5 * deviation:.2f} (5 degrees of freedom)" in cifar.margins(found)[0]


def test_the_table_becomes_files_and_a_section_of_the_page(tmp_path: Path) -> None:
    log(tmp_path / "logs", [90.0, 94.0])
    log(tmp_path / "logs", [90.0, 93.0], preset="sgd")
    options = Options(output=tmp_path / "report")
    log(tmp_path / "logs", [91.0], preset="sgd", lr=0.3)
    cells, others, files = reproduce_cifar(options, tmp_path / "logs")
    assert len(cells) == 4 * len(cifar.OPTIMIZERS)
    assert json.loads(files["json"].read_text())["cells"] == [cell.as_json() for cell in cells]
    assert json.loads(files["json"].read_text())["trials"] == cifar.as_rows(others.trials)
    assert len(others.trials.rows) == 1
    rows = list(csv.DictReader(files["csv"].read_text().splitlines()))
    assert {row["optimizer"] for row in rows if row["run"] == "True"} == {"mkfac", "sgd"}
    section = next(s for s in sections(options.output) if s.name == "cifar")
    assert [series.label for series in section.charts[0].series] == ["SGD", "MKFAC"]
    page = refresh_page(options.output).read_text()
    assert "a &lt;device&gt;" in page
    assert "a <device>" not in page


def test_runs_that_diverged_leave_files_that_are_json(tmp_path: Path) -> None:
    logs, out = tmp_path / "logs", tmp_path / "out"
    log(logs, [10.0], ended="diverged", images=300)
    (path,) = logs.iterdir()
    path.write_text(path.read_text().replace('"train_loss": 1.0', '"train_loss": NaN'))
    files = cifar.write(cifar.cells(logs), cifar.beside(logs), out)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    (trial,) = json.loads(files["json"].read_text(), parse_constant=refuse)["trials"]
    assert trial["training loss"] is None


@pytest.mark.parametrize("written", ["null", "NaN"])
def test_a_seed_that_diverged_is_counted_and_leaves_the_curves_of_the_others(tmp_path: Path, written: str) -> None:
    for seed, accuracies in enumerate(([90.0, 92.0], [80.0, 10.0], [90.0, 91.0])):
        log(tmp_path, accuracies, seed=seed, ended="diverged" if seed == 1 else "done")
    (path,) = tmp_path.glob("*-1-diverged-*")
    head, first, last, end = path.read_text().splitlines(keepends=True)
    path.write_text(head + first + last.replace(" 1.0", f" {written}") + end)
    cell = found(tmp_path)
    assert cifar.text(cell) == "91.00 80.00–92.00 (91.50), 3 seeds, 1 diverged [94.76]"
    (chart,) = cifar.section(cifar.cells(tmp_path), cifar.beside(tmp_path), command="x").charts
    losses = chart.series[0].y["train_loss"]
    assert (losses.median, losses.least, losses.greatest) == ([1.0, 1.0], [1.0, 1.0], [1.0, 1.0])


def test_a_seed_that_diverged_early_does_not_end_the_curves_of_the_others(tmp_path: Path) -> None:
    for seed, accuracies in enumerate(([80.0], [90.0, 92.0, 94.0], [88.0, 91.0, 93.0])):
        log(tmp_path, accuracies, seed=seed, ended="done" if seed else "diverged")
    (chart,) = cifar.section(cifar.cells(tmp_path), cifar.beside(tmp_path), command="x").charts
    (series,) = chart.series
    assert series.x == {"epoch": [1.0, 2.0, 3.0], "seconds": [0.5, 1.0, 1.5]}
    assert series.y["accuracy"].median == [88.0, 91.5, 93.5]
    assert series.y["accuracy"].least == [80.0, 91.0, 93.0]


def test_a_missing_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"cifar10 --folder .* makes one, or .* reproduce cifar --results"):
        cifar.cells(tmp_path / "nowhere")


def test_the_recorded_runs_of_the_repository_are_those_of_the_presets() -> None:
    folder = Path(__file__).parents[2] / "results" / "cifar"
    if not folder.is_dir():
        pytest.skip("an installed package has no results folder")
    cells = cifar.cells(folder)
    for cell in cells:
        for run in cell.runs:
            own = settings(cell.optimizer, cell.dataset, cell.model).as_json()
            told = {**run.header["settings"], "preset": cell.optimizer}
            assert told == {key: own[key] for key in told}
    # a file's name says what is not the preset's own, so that a queue finds what is there
    counted = sum(len(cell.runs) for cell in cells)
    for sub in (folder, folder / "search"):
        for path in (path for path in sub.glob("*.jsonl") if path.name != CHOICES):
            header = RunLog.read(path).header
            assert re.fullmatch("[0-9a-f]{40}", header["commit"]), path.name
            told = header["dataset"], header["model"], Settings(**header["settings"]), header["seed"], header["split"]
            assert path.name == log_name(*told, None)
            preset = preset_of(told[2], *told[:2])
            counted -= sub == folder and replace(settings(preset, *told[:2]), preset=header["preset"]) == told[2]
    assert counted == 0


def test_runs_in_no_cell_are_listed_with_what_differs_from_their_presets(tmp_path: Path) -> None:
    log(tmp_path, [94.0])
    log(tmp_path, [80.0, 93.0], lr=0.5)
    log(tmp_path, [50.0], images=1000, schedule="cosine", refresh_every=5)
    log(tmp_path / "search", [70.0, 88.0], split="validation", images=45_000, epochs=2)
    log(tmp_path / "search", [70.0, 89.0], split="validation", images=45_000, epochs=2, damping=3.0)
    log(tmp_path / "search", [70.0], split="validation", ended="", momentum=0.1)
    shown = cifar.trials(tmp_path)
    assert [list(row[2:6]) for row in shown.rows] == [
        ["schedule cosine, refresh_every 5, 1000 images", "test", 1, 50.0],
        ["lr 0.5", "test", 2, 93.0], ["damping 3", "validation", 2, 89.0], ["nothing", "validation", 2, 88.0]
    ]  # fmt: skip
    assert shown.rows[0][:2] == ("CIFAR-10 VGG16-BN", "MKFAC")
    assert cifar.as_rows(shown)[2]["what differs"] == "damping 3"


def test_searches_are_listed_with_what_the_preset_has(tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    asked = {"dataset": "cifar100", "model": "vgg16bn", "preset": "sgd", "changes": {"epochs": 8}, "rounds": [1, 8]}
    tried = [
        {"candidate": {"lr": rate}, "epochs": epochs, "accuracy": 10.0 * epochs - rate}
        for epochs, rates in ((1, (0.5, 0.05, 0.02, 0.01)), (8, (0.05, 0.02)))
        for rate in rates
    ]
    record = {**asked, "candidates": [], "chosen": {"lr": 0.02}, "tried": tried}
    unlike = {**record, "preset": "adam", "chosen": {"lr": 0.02}}
    (tmp_path / "search" / CHOICES).write_text("".join(json.dumps(each) + "\n" for each in (record, unlike)))
    shown = cifar.as_rows(cifar.searches(tmp_path))
    assert shown[0] == {
        "task": "CIFAR-100 VGG16-BN", "preset": "SGD", "trials": 6, "epochs of the last": 8, "chosen": "lr 0.02",
        "accuracy": 79.98, "the preset has": "lr 0.05", "its accuracy": 79.95,
    }  # fmt: skip
    assert (shown[1]["the preset has"], shown[1]["its accuracy"]) == ("lr 0.0005", None)  # left after the first round
    assert not cifar.searches(tmp_path / "search").rows
