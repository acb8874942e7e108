"""What the cells of the table say: of the paper's claim, and of our own settings beside those of others."""

from __future__ import annotations

from collections.abc import Sequence

from fisherfold.plain import counted
from fisherfold.reproduce.cifar.cells import LABELS, NAMES, PAPER, PAPER_SEEDS, TASKS, CellResult
from fisherfold.reproduce.sections import Table, Verdict
from fisherfold.reproduce.seeds import Spread

OURS_AGAINST = (
    ("mkfac-tuned", "sgd-tuned"), ("mkfac-averaged", "sgd-tuned"), ("mkfac-averaged", "sgd-averaged"),
    ("mkfac-sam", "sgd-tuned"), ("mkfac-sam", "sgd-sam"),
    ("mkfac-cutmix", "sgd-tuned"), ("mkfac-cutmix", "sgd-cutmix"),
)  # fmt: skip
CLAIM = "MKFAC has the best test accuracy of six optimizers with WRN-16-4 and VGG16-BN on CIFAR-10 and CIFAR-100."
# of seeds, until there are enough of them to tell: what those in results/cifar have
GUESSED_DEVIATIONS = {"cifar10": 0.15, "cifar100": 0.25}


def judge(found: Sequence[CellResult]) -> tuple[Verdict, list[str]]:
    """What the runs say about the paper's claim, task by task.

    Args:
        found: of ``cells``.

    Returns:
        A verdict and a sentence per task that can be judged.
    """
    by_name = {(c.dataset, c.model, c.optimizer): c for c in found}
    sentences, wins, spreads = [], [], spreads_of(found)
    for dataset, model in TASKS:
        task = f"{NAMES[dataset]} {NAMES[model]}"
        mine = by_name[dataset, model, "mkfac"]
        rivals = [by_name[dataset, model, name] for name in PAPER if name != "mkfac"]
        run = [rival for rival in rivals if rival.runs]
        if not mine.runs or not run:
            sentences.append(f"{task}: not enough was run to judge.")
            continue
        top = max(run, key=lambda rival: rival.best[0])
        gap, margin = mine.best[0] - top.best[0], spreads[dataset].margin(len(mine.runs), len(top.runs))
        wins.append(gap > margin)
        sentences.append(
            f"{task}: MKFAC {mine.best[0]:.2f} is {_where(gap, margin)} the best of {counted(len(run), 'rival')}, "
            f"{LABELS[top.optimizer]} {top.best[0]:.2f}; the paper has {mine.paper:.2f} and {top.paper:.2f}."
        )
    if not wins:
        return "not run", sentences
    verdict: Verdict = "holds" if all(wins) and len(wins) == 4 else "holds partly" if any(wins) else "does not hold"
    return verdict, sentences


def _where(gap: float, margin: float) -> str:
    return "above" if gap > margin else "below" if gap < -margin else "within noise of"


def against_paper(found: Sequence[CellResult]) -> list[str]:
    """Which of our medians contradict those of the paper, if its seeds differ as ours do.

    Args:
        found: of ``cells``.

    Returns:
        A sentence per optimizer of the paper that was run.
    """
    sentences, spreads = [], spreads_of(found)
    for optimizer in PAPER:
        tasks: dict[str, list[str]] = {"above": [], "below": [], "within noise of": []}
        for cell in found:
            if cell.optimizer == optimizer and cell.runs and cell.paper is not None:
                gap, margin = cell.best[0] - cell.paper, spreads[cell.dataset].margin(len(cell.runs), PAPER_SEEDS)
                tasks[_where(gap, margin)].append(f"{NAMES[cell.dataset]} {NAMES[cell.model]} ({gap:+.2f})")
        if parts := [f"{where} the paper on {', '.join(those)}" for where, those in tasks.items() if those]:
            sentences.append(f"{LABELS[optimizer]}: {'; '.join(parts)}.")
    return sentences


def spreads_of(found: Sequence[CellResult]) -> dict[str, Spread]:
    """By how much seeds differ, in all cells of a data set alike.

    Args:
        found: of ``cells``.

    Returns:
        A spread per data set.
    """
    done = [(cell.dataset, [run.best for run in cell.runs if run.ended == "done"]) for cell in found]
    guesses = GUESSED_DEVIATIONS.items()
    return {d: Spread.of([best for own, best in done if own == d], guess=guess) for d, guess in guesses}


def comparisons(found: Sequence[CellResult]) -> Table:
    """What our own settings reach, less SGD with tuned weight decay, SGD treated likewise, and the paper.

    Args:
        found: of ``cells``.

    Returns:
        A row per pair, a column per task; nothing where one of the two was not run.
    """
    by_name, spreads = {(c.dataset, c.model, c.optimizer): c for c in found}, spreads_of(found)
    rows = []
    for ours, theirs in OURS_AGAINST:
        pairs = [(d, by_name[d, m, ours], by_name[d, m, theirs]) for d, m in TASKS]
        gaps = [
            _gap(mine, other.best[0], len(other.runs), spreads[d]) if mine.runs and other.runs else ""
            for d, mine, other in pairs
        ]
        rows.append([LABELS[ours], LABELS[theirs], *gaps])
    own = [[by_name[d, m, ours] for ours, _ in OURS_AGAINST if by_name[d, m, ours].runs] for d, m in TASKS]
    tops = [max(cells, key=lambda cell: cell.best[0], default=None) for cells in own]
    papers = zip(TASKS, PAPER["mkfac"], tops, strict=True)
    gaps = ["" if top is None else _gap(top, paper, PAPER_SEEDS, spreads[task[0]]) for task, paper, top in papers]
    rows.append(["the best of these", "MKFAC of the paper", *gaps])
    columns = ["settings", "less", *(f"{NAMES[d]} {NAMES[m]}" for d, m in TASKS)]
    return Table("Our settings of MKFAC: points above others, in brackets where that is within noise", columns, rows)


def _gap(mine: CellResult, other: float, seeds: int, spread: Spread) -> str:
    gap = mine.best[0] - other
    words = f"{gap:+.2f}"
    return f"({words})" if abs(gap) <= spread.margin(len(mine.runs), seeds) else words


def margins(found: Sequence[CellResult]) -> list[str]:
    """How far apart medians must be to differ.

    Args:
        found: of ``cells``.

    Returns:
        A sentence per data set, and what the margins do not say.
    """
    sentences = [
        f"{NAMES[dataset]}: the seeds of a cell have a standard deviation of {spread.deviation:.2f}"
        + (f" ({counted(spread.freedom, 'degree')} of freedom)" if spread.freedom else " (a guess: too few were run)")
        + f"; single runs closer than {spread.margin(1, 1):.2f}, medians of five closer than {spread.margin(5, 5):.2f} "
        "are called the same."
        for dataset, spread in spreads_of(found).items()
    ]
    chance = "Each margin is that of one comparison: of twenty pairs that are the same, one lies further apart."
    return [*sentences, chance, "The paper gives no spread; its seeds are taken to differ as ours do."]
