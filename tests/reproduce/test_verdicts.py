"""Verdicts from runs whose outcome is known."""

from __future__ import annotations

import math

import pytest

from fisherfold.reproduce.figures import FigurePlan, FigureResult, MethodPlan, Run
from fisherfold.reproduce.reproduce import figure_section
from fisherfold.reproduce.verdicts import Comparison, compare, cost_of, judge, true_count

LABELS = ("RNGD", "RSGD", "RCG", "ours")


def result(
    curves: dict[str, list[list[float]]], name: str = "school", true: dict[str, int] | None = None
):
    """A figure whose only error follows the given curves, a list per seed."""
    methods = tuple(MethodPlan(label, "rcg", 1, paper=label != "ours") for label in curves)
    plan = FigurePlan(name, "A figure", lambda seed: None, methods, 4, {"error": "the error"})
    rate = true or {}
    runs = {
        label: [
            Run(
                label,
                None,
                seed,
                "max_iter",
                [
                    {
                        "error": v,
                        "loss": v,
                        "seconds": 0.1 * k,
                        "paper_grads": k,
                        "true_grads": rate.get(label, 1) * k,
                    }
                    for k, v in enumerate(curve)
                ],
            )
            for seed, curve in enumerate(seeds)
        ]
        for label, seeds in curves.items()
    }
    return FigureResult(plan, tuple(range(len(next(iter(curves.values()))))), {}, runs)


def ends(**finals: list[float]) -> dict[str, list[list[float]]]:
    return {label: [[9.0, v] for v in values] for label, values in finals.items()}


@pytest.mark.parametrize(
    ("own", "outcome"),
    [
        ([1.0, 1.0, 1.0, 1.0, 3.0], "ahead"),  # four of five
        ([1.0, 1.0, 1.0, 3.0, 3.0], "behind"),
        ([1.0, 1.0, 2.03, 2.03, 3.0], "level"),  # two ahead, two within 2 %
        ([2.0, 2.0, 2.0, 2.0, 2.0], "level"),
        ([math.inf] * 5, "behind"),
    ],
)
def test_outcomes_are_counted_seed_by_seed(own, outcome):
    found = compare(result(ends(RNGD=own, RSGD=[2.0] * 5, RCG=[4.0] * 5)), "error", "lowest")
    assert found.other == [2.0] * 5
    assert found.outcome == outcome


def test_ours_takes_no_part_in_the_papers_claim():
    found = compare(result(ends(RNGD=[2.0], RSGD=[3.0], ours=[1.0])), "error", "lowest")
    assert (found.own, found.other, found.outcome) == ([2.0], [3.0], "ahead")


def test_fastest_is_the_first_to_come_within_five_percent_of_the_lowest():
    curves = {"RNGD": [[9, 1.04, 1.03, 1.02]], "RSGD": [[9, 5, 1.04, 1.0]]}
    found = compare(result(curves), "error", "fastest")
    assert (found.own, found.other, found.outcome) == ([1.0], [2.0], "ahead")
    slow = compare(
        result({"RNGD": [[9, 8, 7, 6]], "RSGD": [[9, 5, 1.04, 1.0]]}), "error", "fastest"
    )
    assert (slow.own, slow.outcome) == ([math.inf], "behind")
    assert "median never, best other: 2 #grad/N): behind" in slow.sentence("the error", "RNGD")


def test_a_level_that_is_never_reached_costs_infinitely_much():
    run = Run(
        "RCG",
        None,
        0,
        "max_iter",
        [{"error": math.nan, "paper_grads": 0}, {"error": 2.0, "paper_grads": 1}],
    )
    assert cost_of(run, "error", 2.0) == 1
    assert cost_of(run, "error", 1.9) == math.inf


def outcome_of(outcome: str) -> Comparison:
    own = {"ahead": 1.0, "level": 2.0, "behind": 3.0}[outcome]
    return Comparison("error", "lowest", [own], [2.0])


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        (("ahead", "ahead"), "holds"),
        (("ahead", "level"), "holds partly"),
        (("ahead", "behind"), "holds partly"),
        (("level", "level"), "holds partly"),
        (("level", "behind"), "does not hold"),
        (("behind", "behind"), "does not hold"),
    ],
)
def test_the_verdict_of_a_figure(outcomes, verdict):
    assert judge([outcome_of(o) for o in outcomes]) == verdict


def test_the_true_count_is_compared_at_the_same_cost():
    # RNGD ends lowest, but at the cost the others had it was still above them
    found = result({"RNGD": [[9, 5, 1]], "RCG": [[9, 4, 3]]}, true={"RNGD": 2})
    paper, true = compare(found, "error", "lowest"), compare(found, "error", "lowest", true=True)
    assert (paper.own, paper.other, paper.outcome) == ([1], [3], "ahead")
    assert (true.own, true.other, true.outcome) == ([5], [3], "behind")
    sentence = true_count(found, [true])
    assert sentence == (
        "With every sample gradient counted (#grad/N: RNGD 4, RCG 2): the error behind (0 of 1 seed)."
    )
    assert judge([paper]) == judge([paper], [paper]) == "holds"
    assert judge([paper], [true]) == "holds partly"
    assert judge([true], [paper]) == "does not hold"


def test_fastest_in_the_true_count_is_measured_against_what_all_had_reached_by_then():
    found = result({"RNGD": [[9, 4, 1]], "RCG": [[9, 8, 3, 3, 3]]}, true={"RNGD": 2})
    assert compare(found, "error", "fastest").outcome == "ahead"
    # both spend four gradients; RNGD needs all of them, and RCG never gets there
    true = compare(found, "error", "fastest", true=True)
    assert (true.own, true.other) == ([4], [math.inf])


def test_a_figure_section_has_the_verdict_the_curves_and_the_numbers():
    found = result({"RNGD": [[9, 1.0], [9, 1.2]], "RSGD": [[9, 2.0], [9, 2.5]]})
    section = figure_section(found)
    assert section.verdict == "holds"
    medians = "median 1.1, best other: 2.25, -51.1%"
    assert section.why[0] == f"the error: RNGD ends lowest on 2 of 2 seeds ({medians}): ahead."
    assert section.tables[0].rows[0][0] == "RNGD"
    assert section.tables[0].rows[0][2] == pytest.approx(1.1)
    worse = result({"RNGD": [[9, 3.0]], "RSGD": [[9, 2.0]]})
    assert figure_section(worse).verdict == "does not hold"
