"""What is to be trained, in order: the cells of the paper's table, or the lines of a file.

A plan is a file of JSON lines such as

    {"dataset": "cifar10", "model": "vgg16bn", "preset": "sgd", "seed": 0, "split": "validation", "lr": 0.1}

whose further entries replace settings of the preset. With ``"candidates"``, a list of such replacements, the best of
them is searched on the validation split first, in rounds: all candidates are trained for the first number of epochs in
``"rounds"``, the better third of them for the second, and so on. A list of lists is searched one list after the other,
each with the best of those before it, which stays if none of them is better.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fisherfold.training.options import Settings, kind_of_setting
from fisherfold.training.presets import settings

Candidates = tuple[dict[str, Any], ...]
ROUNDS = (16,)
DATASETS, NETWORKS = ("cifar10", "cifar100"), ("vgg16bn", "wrn16_4")
FIRST = ("sgd", "mkfac", "sgdg", "kfac")
THEN = (
    *("sgdg-limit", "mkfac-tuned", "sgd-tuned", "mkfac-averaged", "sgd-averaged", "mkfac-sam", "sgd-sam"),
    *("mkfac-cutmix", "sgd-cutmix"),
    *("sgdp", "adam", "adamp", "sgdg-tuned"),
)
# the sets in which the paper searches: rates of all baselines, β₁ and β₂ of Adam and AdamP
PAPER_RATES = tuple(float(f"{digit}e-{power}") for power in range(1, 6) for digit in (5, 2, 1))
PAPER_BETAS = (0.9, 0.99, 0.999)
PAPER_BASELINES = ("sgd", "kfac", "adam", "sgdp", "adamp")
PAPER_ROUNDS = (1, 8)


@dataclass(frozen=True)
class Entry:
    """One run, or a search followed by the run of what it found.

    Attributes:
        dataset: cifar10 or cifar100.
        model: the network.
        preset: whose settings.
        changes: settings to replace.
        seed: of the run.
        split: ``"test"`` or ``"validation"``.
        stages: replacements to choose from, one list after the other; empty where there is nothing to search.
        rounds: the epochs of each round of the search.
    """

    dataset: str
    model: str
    preset: str
    changes: dict[str, Any]
    seed: int = 0
    split: str = "test"
    stages: tuple[Candidates, ...] = ()
    rounds: tuple[int, ...] = ROUNDS

    def __post_init__(self) -> None:
        for change in (self.changes, *(candidate for stage in self.stages for candidate in stage)):
            for name in change:
                kind_of_setting(name)
            self.settings(**change)
        if self.split not in ("test", "validation"):
            raise ValueError(f"split must be 'test' or 'validation', got {self.split!r}")
        if not self.rounds or any(not _whole(r) or r < 1 for r in self.rounds):
            raise ValueError(f"rounds must be numbers of epochs, got {list(self.rounds)}")
        if any("epochs" in candidate for stage in self.stages for candidate in stage):
            raise ValueError("candidates are trained for the epochs of the rounds and cannot differ in epochs")

    @classmethod
    def of(cls, line: dict[str, Any]) -> Entry:
        """An entry as a plan spells it.

        Args:
            line: of a plan.

        Returns:
            The entry.

        Raises:
            ValueError: if a name, a setting or a value is not known.
        """
        task = dict(line)
        if missing := [key for key in ("dataset", "model", "preset") if key not in task]:
            raise ValueError(f"{missing[0]!r} is missing")
        dataset, model, preset = (task.pop(key) for key in ("dataset", "model", "preset"))
        seed, split = task.pop("seed", 0), task.pop("split", "test")
        candidates, rounds = task.pop("candidates", []), task.pop("rounds", ROUNDS)
        if not _whole(seed) or not isinstance(candidates, list) or not isinstance(rounds, list | tuple):
            raise ValueError("seed must be a whole number, candidates and rounds must be lists")
        stages = candidates if candidates and isinstance(candidates[0], list) else [candidates] if candidates else []
        if not all(isinstance(stage, list) and all(isinstance(c, dict) for c in stage) and stage for stage in stages):
            raise ValueError("candidates must be a list of objects, or a list of such lists")
        lists = tuple(tuple(stage) for stage in stages)
        return cls(dataset, model, preset, task, seed, split, lists, tuple(rounds))

    def settings(self, **changes: Any) -> Settings:
        """The settings of the run.

        Args:
            **changes: to replace besides the entry's own.

        Returns:
            The settings.

        Raises:
            ValueError: if they are not possible.
        """
        try:
            return settings(self.preset, self.dataset, self.model, **{**self.changes, **changes})
        except TypeError as error:
            raise ValueError(str(error)) from None

    def trial(self, candidate: dict[str, Any], epochs: int) -> Entry:
        """A short run on the validation split.

        Args:
            candidate: the replacements to try.
            epochs: of the run.

        Returns:
            An entry without a search.
        """
        changes = {**self.changes, **candidate, "epochs": epochs}
        return Entry(self.dataset, self.model, self.preset, changes, 0, "validation")

    def chosen(self, candidate: dict[str, Any]) -> Entry:
        """The run with one of the candidates.

        Args:
            candidate: the replacements.

        Returns:
            An entry without a search.
        """
        return Entry(self.dataset, self.model, self.preset, {**self.changes, **candidate}, self.seed, self.split)

    @property
    def company(self) -> tuple[Any, ...]:
        """What runs must have in common to be trained side by side."""
        return self.dataset, self.split, self.model, self.settings().epochs


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_plan(path: Path) -> list[Entry]:
    """The entries of a file.

    Args:
        path: of JSON lines.

    Returns:
        The entries, in order.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if a line is none; it says which and why.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no plan {path}")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise ValueError(f"an entry is an object, got {line.strip()[:60]}")
            found.append(Entry.of(entry))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return found


def default_plan(seeds: int) -> list[Entry]:
    """The whole table in the order of importance, one seed of everything before the next seed of anything.

    Args:
        seeds: how many.

    Returns:
        The entries.
    """
    cells = [(d, m, p) for names in (FIRST, THEN) for d in DATASETS for m in NETWORKS for p in names]
    return [Entry(d, m, p, {}, seed) for seed in range(seeds) for d, m, p in cells]


def grid_plan() -> list[Entry]:
    """The searches of the paper's baselines in the paper's sets, task by task, and no runs besides.

    Returns:
        The entries; each ends as the trial that it has chosen.
    """
    whole = {"epochs": PAPER_ROUNDS[-1]}
    return [
        Entry(d, m, p, whole, split="validation", stages=paper_grid(p), rounds=PAPER_ROUNDS)
        for d in reversed(DATASETS)
        for m in NETWORKS
        for p in PAPER_BASELINES
    ]


def paper_grid(preset: str) -> tuple[Candidates, ...]:
    """What the paper searched for a baseline: rates, then the betas of Adam and AdamP.

    KFAC's damping is given, 2 in all tasks, and so are all settings of MKFAC.

    Args:
        preset: a name of ``PRESETS``.

    Returns:
        Lists of candidates; none where the paper gives the settings, or has no such row.

    Example:
        >>> len(paper_grid("sgd")[0]), paper_grid("mkfac")
        (15, ())
    """
    if preset not in PAPER_BASELINES:
        return ()
    rates: Candidates = tuple({"lr": rate} for rate in PAPER_RATES)
    betas: Candidates = tuple({"momentum": b1, "beta2": b2} for b1 in PAPER_BETAS for b2 in PAPER_BETAS)
    return (rates, betas) if preset.startswith("adam") else (rates,)
