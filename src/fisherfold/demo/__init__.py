"""``fisherfold demo``: films with intervals, a network and a constrained model."""

from __future__ import annotations

from fisherfold.demo.films import Films, read_films, recommend_films
from fisherfold.demo.page import draw, write_page
from fisherfold.demo.races import Race, race_gradients, race_networks

__all__ = [
    "Films",
    "Race",
    "draw",
    "race_gradients",
    "race_networks",
    "read_films",
    "recommend_films",
    "write_page",
]
