"""The demo's problems: solved to the bottom by rngd, and drawn whole."""

from fisherfold.reproduce import demo
from fisherfold.reproduce.adapters import demo_section
from fisherfold.solvers import GradientNorm, minimize


def test_rngd_goes_below_every_first_order_method_on_both_problems():
    for name, make in (("completion", demo.completion), ("multi-task", demo.multi_task)):
        problem, start = make(0)
        rngd = minimize(problem, start, "rngd", fisher=demo.FISHER[name], stop=GradientNorm(1e-9))
        rcg = minimize(problem, start, "rcg", max_iter=60, stop=GradientNorm(1e-9))
        assert rngd.status == "converged"
        assert rngd.value < rcg.value


def test_gaps_are_measured_from_the_lowest_loss_of_a_problem_and_the_digits_from_zero():
    runs = [
        demo.Run("completion", "rngd", [0, 1], [3.0, 1.0], 0.1),
        demo.Run("completion", "rcg", [0, 1], [3.0, 1.5], 0.1),
        demo.Run("digits", "sgd", [0, 1], [2.0, 0.5], 0.1),
    ]
    assert demo.gaps(runs) == {
        ("completion", "rngd"): [2.0, 0.0], ("completion", "rcg"): [2.0, 0.5], ("digits", "sgd"): [2.0, 0.5],
    }  # fmt: skip


def test_table_and_page_say_from_where_gaps_are_measured():
    from fisherfold.cli.demo import _table

    runs = [demo.Run(problem, "sgd", [0.0, 1.0], [2.0, 0.5], 0.1) for problem in demo.TITLES]
    page = demo_section(runs, command="fisherfold demo").tables[0].title
    for said in (page, _table(runs).caption):
        assert "gap: training loss above the lowest found (for the digits: the loss itself)" in said


def test_the_picture_is_a_png(tmp_path):
    curve = [0.0, 1.0], [2.0, 0.5]
    runs = [demo.Run(problem, "rcg" if problem != "digits" else "sgd", *curve, 0.1)
            for problem in ("completion", "multi-task", "digits")]  # fmt: skip
    demo.draw(runs, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_fits_a_terminal_of_eighty_columns():
    from rich.console import Console

    from fisherfold.cli.demo import _table

    runs = [demo.Run("completion", "rsvrg", [0, 190], [3.0, 14.3235], 99.9, 6.9e-4),
            demo.Run("digits", "riem. sgd", [0, 12], [2.0, 0.0005], 135.0, 0.1, 0.9912)]  # fmt: skip
    console = Console(width=80, record=True)
    console.print(_table(runs))
    text = console.export_text()
    assert "…" not in text
    assert "99.1" in text
