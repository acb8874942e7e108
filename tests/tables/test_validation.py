"""Parameters are checked by one table of checks; every message has the name, what is expected and the value."""

import numpy as np
import pytest
import torch

from fisherfold.tables import validation as v

CHECKS = {
    "rank": v.integer(1),
    "n_jobs": v.jobs(),
    "ridge": v.optional(v.number()),
    "tol": v.number(0, 1, above=True),
    "offsets": v.choice("both", "none"),
    "verbose": v.verbosity(),
    "clip": v.flag(),
    "ranks": v.each(v.integer(1)),
    "random_state": v.seed(),
    "dtype": v.torch_dtype(),
    "device": v.torch_device(),
}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("rank", np.int64(3), 3),
        ("rank", torch.tensor(3), 3),
        ("ridge", None, None),
        ("ridge", 1, 1.0),
        ("offsets", np.str_("both"), "both"),
        ("verbose", 2, True),
        ("verbose", False, False),
        ("n_jobs", -1, -1),
        ("ranks", (2, 5), [2, 5]),
        ("dtype", np.float32, torch.float32),
        ("dtype", "torch.float64", torch.float64),
        ("device", None, torch.device("cpu")),
        ("random_state", np.int32(4), 4),
        ("n_jobs", None, None),
    ],
)
def test_values_that_are_allowed(name, value, expected):
    assert v.check_parameters({name: value}, CHECKS) == {name: expected}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rank", 0, "rank must be a whole number of at least 1, got 0"),
        ("rank", True, "got True"),
        ("rank", 2.0, "got 2.0"),
        ("rank", "2", "got '2'"),
        ("rank", 2**70, "rank must"),
        (
            "ridge",
            1e308,
            "ridge must be a finite number of at least 0 and at most 1e.30, got 1e.308",
        ),
        ("ridge", float("nan"), "got nan"),
        ("ridge", -1, "got -1"),
        ("tol", 0, "above 0, got 0"),
        ("offsets", "all", "offsets must be one of both, none, got 'all'"),
        ("clip", 1, "True or False, got 1"),
        ("n_jobs", 100_000, "n_jobs must be None, -1 or an integer from 1 to 1024, got 100000"),
        ("n_jobs", 0, "got 0"),
        ("ranks", [], "at least one value"),
        ("ranks", 3, "sequence"),
        ("ranks", [1, 0], "each of ranks"),
        ("random_state", -1, "got -1"),
        ("random_state", 2**63, "got 9"),
        ("dtype", "int8", "float32, float64"),
        ("device", "quantum", "device 'quantum' cannot be used here"),
        ("device", 3, "got 3"),
        ("ranke", 3, "no parameter 'ranke'; the parameters are rank,"),
    ],
)
def test_values_that_are_not_allowed(name, value, message):
    with pytest.raises(ValueError, match=message):
        v.check_parameters({name: value}, CHECKS)


def test_what_is_set_for_a_run_is_neither_saved_nor_loaded():
    params = {"rank": 3, "checkpoint": "/etc/passwd", "n_jobs": 10**9}
    assert v.saved_parameters(params | {"random_state": np.random.default_rng()}) == {
        "rank": 3,
        "random_state": None,
    }
    assert v.loaded_parameters(params, CHECKS) == {"rank": 3}
    for bad in ({"rank": 0}, {"what": 1}, [1]):
        with pytest.raises(ValueError, match=r"rank|what|list"):
            v.loaded_parameters(bad, CHECKS)


def test_seeds_are_drawn():
    assert v.draw_seed(5) == 5
    assert v.draw_seed(None, 3) == 3
    assert v.draw_seed(np.random.RandomState(0)) == v.draw_seed(np.random.RandomState(0))
    assert v.draw_seed(np.random.default_rng(1)) == v.draw_seed(np.random.default_rng(1))
