"""The curves of a picture, read back for the page."""

from matplotlib.figure import Figure

from fisherfold.reproduce.theory.charts import charts_of


def picture():
    figure = Figure()
    left, right = figure.subplots(1, 2)
    for seed, values in enumerate(([4.0, 1.0], [2.0, 3.0, 5.0], [6.0, float("nan"), 9.0])):
        left.plot(range(len(values)), values, color="b", label="runs" if seed == 0 else None)
    left.plot([0, 1], [1, 1], "--", color="grey", label="slope 1")
    left.plot([0, 1], [2, 2], "--", color="grey", label="slope 2")
    left.plot([0, 1], [3, 3], ":", color="k", label="_guide a bound")
    left.plot([0, 1], [9, 9], "-.", color="y")
    left.set(xlabel="iteration", ylabel="the loss", yscale="log")
    right.bar([0, 1], [2, 3], label="bars")
    return figure


def test_lines_of_one_label_become_a_band_and_guides_stay_apart():
    (chart,) = charts_of(picture())
    assert (chart.title, chart.axes, chart.metrics) == ("the loss", {"x": "iteration"}, {"y": "the loss"})
    assert (chart.log_x, chart.log_y) == (False, True)
    assert [series.label for series in chart.series] == ["runs", "slope 1", "slope 2", "a bound"]
    runs = chart.series[0]
    assert runs.x["x"] == [0.0, 1.0, 2.0]
    assert runs.y["y"].median == [4.0, 2.0, 7.0]
    assert runs.y["y"].least == [2.0, 1.0, 5.0]
    assert runs.y["y"].greatest == [6.0, 3.0, 9.0]
    assert chart.series[2].y["y"].median == [2.0, 2.0]


def test_guides_are_not_in_the_legend_of_the_picture():
    _, labels = picture().axes[0].get_legend_handles_labels()
    assert labels == ["runs", "slope 1", "slope 2"]
