"""The demo as a picture and as a page of one file, light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import polars as pl
from matplotlib.figure import Figure

from fisherfold._version import __version__
from fisherfold.demo.films import Films
from fisherfold.demo.races import Race
from fisherfold.html import Html, document, image, table
from fisherfold.plots import plot_calibration

COLOURS = ("#d55e00", "#0072b2", "#009e73")
CSS = """
:root { --bar: #d55e0055; --dot: #d55e00; }
@media (prefers-color-scheme: dark) { :root { --bar: #ff8c4266; --dot: #ff8c42; } }
h1 { margin-top: 1rem; } h2 { font-size: 1.15rem; margin: 1.6rem 0 .4rem; } table { width: 100%; }
.two { display: grid; grid-template-columns: 2fr 4fr; gap: 0 2rem; }
.range { position: relative; display: block; width: 8rem; height: .9rem; }
.range::before { content: ""; position: absolute; top: .42rem; left: 0; right: 0; height: 1px;
  background: var(--line); }
.range i { position: absolute; top: .3rem; height: .3rem; border-radius: .2rem;
  background: var(--bar); }
.range b { position: absolute; top: .15rem; width: .6rem; height: .6rem; margin-left: -.3rem;
  border-radius: 50%; background: var(--dot); }
.picture { margin-top: 1.6rem; }
@media (max-width: 44rem) { .two { grid-template-columns: 1fr; }
  .two tr > :nth-child(4) { display: none; }
  .picture img { width: 62rem; } }
"""


def draw(films: Films, networks: Sequence[Race], gradients: Sequence[Race]) -> bytes:
    """The picture: accuracy, calibration, and both races."""
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(11, 2.9), layout="constrained")
        accuracy, calibration, network, gradient = figure.subplots(1, 4)
        _bars(accuracy, films.accuracy)
        plot_calibration(*films.held_out, ax=calibration).set(title="Intervals hold what they say")
        for race, colour in zip(networks, COLOURS, strict=False):
            network.plot(
                race.seconds,
                race.values,
                "o-",
                color=colour,
                markersize=3,
                label=race.method.split(",")[0],
            )
        lowest = min(min(race.values) for race in networks)
        network.set(
            title="A network with batch norm",
            xlabel="CPU seconds",
            ylabel="test accuracy, %",
            ylim=(max(lowest, 90) - 2, 100.2),
        )
        for race, colour in zip(gradients, COLOURS, strict=False):
            gradient.plot(race.seconds, race.values, color=colour, label=race.method)
        gradient.set(
            title="Regression on a sphere",
            xlabel="seconds",
            ylabel="loss above the minimum",
            yscale="log",
            ylim=(None, 1e4),
        )
        for panel in (network, gradient):
            panel.legend(
                frameon=False, fontsize=8, loc="lower right" if panel is network else "upper right"
            )
        for panel in (calibration, network, gradient):
            panel.grid(alpha=0.3)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=130)
        return out.getvalue()


def _bars(panel: Any, accuracy: pl.DataFrame) -> None:
    names = [re.sub(r"(?<=,) |(?<=fisherfold) | (?=\+)", "\n", name) for name in accuracy["method"]]
    values = accuracy["held-out RMSE"].to_list()
    colours = ["#8a8f96"] * (len(values) - 1) + [COLOURS[0]]
    panel.barh(names, values, color=colours)
    panel.invert_yaxis()
    for place, value in enumerate(values):
        panel.text(
            value - 0.02, place, f"{value:.3f}", va="center", ha="right", color="white", fontsize=8
        )
    panel.set(title="Error on held-out ratings", xlabel="RMSE, stars")


def write_page(films: Films, picture: bytes, target: Path) -> None:
    """Write the page."""
    accuracy = table(films.accuracy.columns, films.accuracy.iter_rows(), label="Accuracy")
    liked, rated = (
        table(["film", "rating"], frame.select("title", "rating").iter_rows(), label="Ratings")
        for frame in (films.favourites, films.new_person)
    )
    body = f"""<h1>Ten films for person {films.person}, and how sure the model is</h1>
<p class="note">Learnt from {films.ratings:,} ratings of {films.films:,} films by {films.people}
people on this machine. Dots are expected ratings, bars 80 % intervals for the rating this person
would give, from half a star to five. Films with fewer than twenty ratings are left out.</p>
<div class="two"><div><h2>Person {films.person} likes</h2>{liked}</div>
<div><h2>Recommended</h2>{_ranges(films.recommended)}</div></div>
<div class="two"><div><h2>Somebody new rates five films</h2>{rated}</div>
<div><h2>Recommended at once, without a new fit</h2>{_ranges(films.new_recommended)}</div></div>
<h2>Accuracy on a held-out tenth of the ratings</h2>{accuracy}
<div class="scroll picture">
<img alt="Accuracy, calibration, and two races on wall time" src="{image(picture)}"></div>
<footer><p>Data: MovieLens ml-latest-small (F. M. Harper and J. A. Konstan, 2015).
Written by fisherfold {__version__}.</p>
</footer>"""
    target.write_text(document("fisherfold demo", body, CSS), encoding="utf-8")


def _ranges(frame: pl.DataFrame) -> str:
    rows = []
    for title, mean, low, high in frame.select("title", "expected", "low", "high").iter_rows():
        left, right, dot = (100 * (value - 0.5) / 4.5 for value in (low, high, mean))
        bar = f'<i style="left:{left:.0f}%;width:{right - left:.0f}%"></i>'
        bar += f'<b style="left:{dot:.0f}%"></b>'
        rows.append(
            (
                title,
                round(mean, 1),
                f"{low:.1f} to {high:.1f}",
                Html(f'<span class="range">{bar}</span>'),
            )
        )
    return table(["film", "expected", "80 % interval", "0.5 to 5 stars"], rows, label="Recommended")
