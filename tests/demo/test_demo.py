"""The demo: what it claims of films is true of the data, and the page can be read."""

from __future__ import annotations

import html
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal
from scipy import stats

from fisherfold.demo import Race, draw, race_gradients, read_films, recommend_films, write_page
from fisherfold.demo.films import _titled

DATA = Path(__file__).parents[2] / "examples" / "data" / "movielens_small"
pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason="the data are not part of an installed package"
)


@pytest.fixture(scope="module")
def films():
    return recommend_films(*read_films(DATA))


def test_the_model_is_more_accurate_than_the_baselines_and_its_intervals_hold(films):
    *baselines, ours = films.accuracy["held-out RMSE"]
    assert ours < min(baselines) - 0.03
    y, mean, std = films.held_out
    for level in np.linspace(0.5, 0.95, 10):
        assert np.mean(np.abs(y - mean) <= stats.norm.ppf(0.5 + level / 2) * std) == pytest.approx(
            level, abs=0.03
        )


def test_recommendations_are_new_to_the_person_and_inside_of_their_intervals(films):
    ratings, _ = read_films(DATA)
    seen = set(ratings.filter(userId=films.person)["movieId"])
    assert seen.isdisjoint(films.recommended["movieId"])
    for table in (films.recommended, films.new_recommended):
        assert table.height == 10
        assert table["expected"].is_sorted(descending=True)
        assert (
            table.filter(
                (pl.col("low") <= pl.col("expected")) & (pl.col("expected") <= pl.col("high"))
            ).height
            == 10
        )


def test_titles_are_as_people_say_them():
    movies = pl.DataFrame(
        {"movieId": [1, 2], "title": ["Two Towers, The (2002)", "Léon (a.k.a. Léon) (1994)"]}
    )
    found = _titled(pl.DataFrame({"movieId": [2, 1]}), movies)
    assert_frame_equal(
        found.select("title"), pl.DataFrame({"title": ["Léon (1994)", "The Two Towers (2002)"]})
    )


def test_the_natural_gradient_is_the_first_at_the_minimum():
    natural, *others = race_gradients()
    assert natural.values[-1] < 1e-15
    assert all(len(other.values) > 5 * len(natural.values) for other in others)


def test_the_page_has_the_picture_and_every_title(films, tmp_path):
    races = [Race("ours", [0.1, 0.2], [90.0, 98.0]), Race("SGD", [0.1, 0.2], [91.0, 98.1])]
    picture = draw(films, races, races)
    assert picture.startswith(b"\x89PNG")
    write_page(films, picture, tmp_path / "index.html")
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert text.count("data:image/png;base64") == 1
    assert "http" not in text
    assert all(html.escape(title) in text for title in films.recommended["title"])
