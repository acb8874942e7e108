"""Parameters and data of odd types: a fit works, and its file gives the same model, or it says what is wrong."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from fisherfold import LowRankImputer, MatrixCompletion, MatrixCompletionCV, SubspaceClassifier, SubspaceRegressor

RNG = np.random.default_rng(0)
PAIRS = np.argwhere(RNG.random((8, 6)) < 0.8)
VALUES = RNG.normal(size=len(PAIRS))
X = RNG.normal(size=(48, 3))
TASK = np.arange(48) % 4
Y = X[:, 0] + 0.1 * RNG.normal(size=48)


def completion(**options):
    return MatrixCompletion(**{"rank": 2, "max_iter": 2} | options).fit(PAIRS, VALUES)


def searched(**options):
    return MatrixCompletionCV(**{"ranks": (1, 2), "max_iter": 2} | options).fit(PAIRS, VALUES)


def regressor(**options):
    return SubspaceRegressor(**{"rank": 2, "max_iter": 2} | options).fit(X, Y, task=TASK)


def classifier(**options):
    return SubspaceClassifier(**{"rank": 2, "max_iter": 2, "ridge": 1.0} | options).fit(X, Y > 0, task=TASK)


def imputer(**options):
    table = np.where(RNG.random((10, 4)) < 0.8, RNG.normal(size=(10, 4)), np.nan)
    return LowRankImputer(**{"rank": 2, "max_iter": 2} | options).fit(table)


def predictions(model):
    return model.predict(PAIRS) if isinstance(model, MatrixCompletion) else model.predict(X, task=TASK)


def generators():
    return np.random.RandomState(0), np.random.default_rng(0)


ACCEPTED = [
    (completion, {"rank": np.int64(2), "max_iter": np.int32(2), "n_jobs": np.int64(1)}),
    (completion, {"rank": torch.tensor(2), "tol": torch.tensor(1e-3), "random_state": torch.tensor(3)}),
    (completion, {"ridge": np.float32(0.1), "tol": np.float32(1e-3), "clip": np.bool_(False)}),
    (completion, {"ridge": np.int64(1), "rated_sets": np.bool_(False), "verbose": np.bool_(False)}),
    (completion, {"ridge": torch.tensor(0.5), "offsets": np.str_("rows"), "random_state": np.int64(3)}),
    (completion, {"device": torch.device("cpu"), "dtype": torch.float64}),
    (completion, {"dtype": np.float64, "random_state": None}),
    (completion, {"dtype": np.dtype("float64")}),
    *((completion, {"random_state": state}) for state in generators()),
    (completion, {"inference": "point", "rank": np.int64(2), "ridge": np.float32(0.5), "tol": np.float32(1e-3)}),
    (searched, {"ranks": np.array([1, 2]), "ridges": np.array([0.1, 1.0]), "cv": np.int64(2)}),
    (searched, {"ranks": [np.int64(1)], "ridges": [None, np.float32(0.1)]}),
    (searched, {"ranks": range(1, 3), "ridges": torch.tensor([0.1])}),
    (searched, {"ranks": {1, 2}, "tol": np.float32(1e-3)}),
    (regressor, {"rank": np.int64(2), "tol": np.float32(1e-3), "fit_intercept": np.bool_(False)}),
    (regressor, {"rank": torch.tensor(2), "scale": np.bool_(False), "noise": np.str_("shared")}),
    (regressor, {"inference": "point", "ridge": np.array(0.1), "random_state": np.int64(3)}),
    (regressor, {"inference": "point", "ridge": torch.full((4,), 0.5)}),
    (regressor, {"inference": "point", "solver_options": {"sigma": np.float32(1e-3)}}),
    (regressor, {"inference": "point", "solver_options": {"sigma": torch.tensor(1e-3)}}),
    *((regressor, {"inference": "point", "random_state": state}) for state in generators()),
    (classifier, {"ridge": np.float32(0.1), "fit_intercept": np.bool_(False), "fisher": np.str_("exact")}),
    (classifier, {"ridge": "auto", "random_state": np.random.default_rng(0)}),
]


@pytest.mark.parametrize(("fit", "options"), ACCEPTED)
def test_what_is_accepted_can_be_saved(fit, options, tmp_path):
    model = fit(**options, checkpoint=tmp_path / "checkpoint")
    assert {name: model.get_params()[name] is options[name] for name in options} == dict.fromkeys(options, True)
    model.save(tmp_path / "model")
    again = type(model).load(tmp_path / "model")
    assert np.array_equal(predictions(again), predictions(model))
    for name, value in options.items():
        kept = again.get_params()[name]
        if name in {"random_state", "dtype", "device"} or isinstance(value, dict):
            continue
        given = list(value) if name in {"ranks", "ridges"} else value
        assert np.array_equal(np.asarray(kept, dtype=object), np.asarray(given, dtype=object)), name


@pytest.mark.parametrize("fit", [completion, searched, regressor, classifier, imputer])
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("tol", None, "tol must be a finite number of at least 0, got None"),
        ("tol", "x", "tol must be a finite number of at least 0, got 'x'"),
        ("tol", np.nan, "tol must be a finite number of at least 0, got nan"),
        ("tol", -1, "tol must be a finite number of at least 0, got -1"),
        ("tol", True, "tol must be a finite number of at least 0, got True"),
        ("max_iter", 2.0, "max_iter must be a whole number of at least 1, got 2.0"),
        ("max_iter", True, "max_iter must be a whole number of at least 1, got True"),
        ("random_state", -1, "random_state must be None, a whole number between 0 and .*, got -1"),
        ("random_state", 1.5, "random_state must be .*, got 1.5"),
        ("random_state", "x", "random_state must be .*, got 'x'"),
        ("random_state", True, "random_state must be .*, got True"),
        ("random_state", torch.Generator(), "random_state must be .*, got <torch"),
        ("verbose", "x", "verbose must be a whole number of at least 0, got 'x'"),
        ("checkpoint", 5, "checkpoint must be a path or None, got 5"),
        ("checkpoint", b"x", "checkpoint must be a path or None, got b'x'"),
        ("n_jobs", 1.5, "n_jobs must be None, -1 or at least 1, got 1.5"),
        ("n_jobs", "2", "n_jobs must be None, -1 or at least 1, got '2'"),
    ],
)
def test_shared_parameters_are_refused_by_name(fit, name, value, expected):
    if name not in fit().get_params():
        pytest.skip(f"{fit.__name__} has no {name}")
    with pytest.raises(ValueError, match=expected):
        fit(**{name: value})


@pytest.mark.parametrize(
    ("fit", "options", "expected"),
    [
        (completion, {"inference": np.array(["point", "x"])}, "inference must be one of variational, point, got array"),
        (completion, {"offsets": None}, "offsets must be one of both, rows, columns, global, none, got None"),
        (completion, {"clip": "no"}, "clip must be True or False, got 'no'"),
        (completion, {"rated_sets": None}, "rated_sets must be True or False, got None"),
        (completion, {"device": "nowhere"}, "device 'nowhere' cannot be used here: "),
        (completion, {"device": "meta"}, "device 'meta' cannot be used here: "),
        (completion, {"device": 3}, "device must be None, a name such as cpu or cuda, or a torch.device, got 3"),
        (completion, {"dtype": None}, "dtype must be one of float32, float64, got None"),
        (completion, {"dtype": float}, "dtype must be one of float32, float64, got <class 'float'>"),
        (completion, {"ridge": True}, "ridge must be None or a finite number of at least 0, got True"),
        (completion, {"ridge": np.array([0.1])}, "ridge must be None or a finite number of at least 0, got array"),
        (searched, {"ranks": 2}, "ranks must be a sequence such as a tuple or list, got 2"),
        (searched, {"ranks": "12"}, "ranks must be a sequence such as a tuple or list, got '12'"),
        (searched, {"ranks": None}, "ranks must be a sequence such as a tuple or list, got None"),
        (searched, {"ranks": [1.0]}, "each of ranks must be a whole number of at least 1, got 1.0"),
        (searched, {"ridges": 0.1}, "ridges must be a sequence such as a tuple or list, got 0.1"),
        (searched, {"ridges": ["x"]}, "each of ridges must be None or a finite number of at least 0, got 'x'"),
        (searched, {"ridges": []}, r"ridges must not be empty, got \[\]"),
        (regressor, {"ridge": None}, "ridge must be finite and not negative, .* got None"),
        (regressor, {"ridge": [[1.0]]}, "ridge must be finite and not negative, .* got .*1.0"),
        (regressor, {"solver_options": 5}, "solver_options must be a dictionary or None, got 5"),
        (regressor, {"solver_options": "x"}, "solver_options must be a dictionary or None, got 'x'"),
        (classifier, {"ridge": np.inf}, "ridge must be a positive number or 'auto', got inf"),
        (classifier, {"ridge": [0.1]}, r"ridge must be a positive number or 'auto', got \[0.1\]"),
        (classifier, {"ridge": None}, "ridge must be a positive number or 'auto', got None"),
        (classifier, {"ridge": 0}, "ridge must be a positive number or 'auto', got 0"),
    ],
)
def test_a_parameter_is_refused_by_name(fit, options, expected):
    with pytest.raises(ValueError, match=expected):
        fit(**options)


def test_options_that_a_solver_does_not_have_are_named():
    with pytest.raises(TypeError, match="solver_options of 'rngd': got an unexpected keyword argument 'nonsense'"):
        regressor(inference="point", solver_options={"nonsense": 1})


def test_a_seed_decides_whatever_its_type():
    for fit in (completion, regressor):
        options = {} if fit is completion else {"inference": "point", "solver": "rsgd", "ridge": 1.0}
        found = [predictions(fit(**options, random_state=seed)) for seed in (3, np.int64(3), torch.tensor(3))]
        assert np.array_equal(found[0], found[1])
        assert np.array_equal(found[0], found[2])


def objects(values):
    return np.array(list(values), dtype=object)


@pytest.mark.parametrize("inference", ["variational", "point"])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (VALUES.astype("M8[D]"), r"y must hold numbers, got dtype datetime64\[D\]"),
        (objects(VALUES + 1j), "y must hold numbers, got .*1j.* at position 0"),
        (objects([10**400] * len(PAIRS)), "y must hold numbers, got 1000"),
        ([[1], [1, 2], *[[1]] * (len(PAIRS) - 2)], r"y must hold numbers, got \[1\] at position 0"),
        (np.ma.masked_array(VALUES, mask=np.arange(len(PAIRS)) == 1), "1 of .* the first is nan at row 0, column 1"),
        (np.sign(VALUES) * 1e308, "the values must be of absolute value 1e.300 at most, got 1e.308"),
    ],
)
def test_values_that_are_no_numbers_are_named(inference, values, expected):
    with pytest.raises(ValueError, match=expected):
        completion(inference=inference).fit(PAIRS, values)


@pytest.mark.parametrize("inference", ["variational", "point"])
@pytest.mark.parametrize(
    ("table", "values", "expected"),
    [
        (PAIRS, np.full(len(PAIRS), 3.0), 3.0),
        ([(0, 0)], [7.0], 7.0),
        (np.ones((1, 1)), None, 1.0),
        (sp.csr_array(np.eye(4, dtype=bool)), None, 1.0),
        (sp.csr_array((np.zeros(3), ([0, 1, 2], [0, 1, 2])), shape=(4, 4)), None, 0.0),
    ],
)
def test_values_without_a_spread_are_predicted_and_saved(inference, table, values, expected, tmp_path):
    model = MatrixCompletion(1, inference=inference, offsets="both").fit(table, values)
    np.testing.assert_allclose(model.predict([(0, 0), (99, 0), (0, 99)]), expected, atol=1e-6)
    np.testing.assert_allclose(model.predict_new([0], [expected], [0]), expected, atol=1e-6)
    model.save(tmp_path / "model")
    assert np.array_equal(MatrixCompletion.load(tmp_path / "model").predict([(0, 0)]), model.predict([(0, 0)]))


def test_holes_may_be_masked_or_none():
    table = RNG.normal(size=(6, 5))
    hole = table > 0.8
    expected = MatrixCompletion(1).fit(np.where(hole, np.nan, table))
    with_none = np.where(hole, None, table)
    for given in (np.ma.masked_array(table, mask=hole), with_none, with_none.tolist()):
        model = MatrixCompletion(1).fit(given)
        assert model.model_.posterior.n_ratings == int((~hole).sum())
        assert np.array_equal(model.predict(PAIRS[:9]), expected.predict(PAIRS[:9]))


@pytest.mark.parametrize("inference", ["marginal", "point"])
@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (np.where(Y > 0, "p", "n"), "y must hold numbers, got '[pn]' at position 0"),
        (objects(["1"] * 48), "y must hold numbers, got '1' at position 0"),
        (Y.astype("M8[D]"), r"y must hold numbers, got dtype datetime64\[D\]"),
        (Y * 1e200, "y must be of absolute value 1e150 at most"),
    ],
)
def test_targets_that_are_no_numbers_are_named(inference, targets, expected):
    with pytest.raises(ValueError, match=expected):
        SubspaceRegressor(2, inference=inference).fit(X, targets, task=TASK)


def test_features_whose_squares_overflow_are_named():
    with pytest.raises(ValueError, match="X must be of absolute value 1e150 at most, so that squares are finite"):
        SubspaceClassifier(2).fit(X * 1e200, Y > 0, task=TASK)
    fitted = SubspaceRegressor(2).fit(X, Y, task=TASK)
    for ask in (lambda far: fitted.predict(far, task=TASK, return_std=True), fitted.transform):
        with pytest.raises(ValueError, match="X must be of absolute value 1e150 at most, so that squares are finite"):
            ask(X * 1e200)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (MatrixCompletion(2, inference="point", solver="rngd"), {"inference": "variational"}, "solver must be 'auto'"),
        (MatrixCompletion(2), {"rank": 0}, "rank must be"),
        (SubspaceRegressor(2), {"noise": "loud"}, "noise must be"),
        (SubspaceClassifier(2, ridge=1.0), {"ridge": -1.0}, "ridge must be"),
    ],
    ids=str,
)
def test_a_model_that_could_not_be_read_is_not_written(model, changes, message, tmp_path):
    rng = np.random.default_rng(0)
    X, task = rng.normal(size=(30, 3)), np.arange(30) % 3
    if isinstance(model, MatrixCompletion):
        model.fit(X)
    else:
        model.fit(X, X[:, 0] if isinstance(model, SubspaceRegressor) else X[:, 0] > 0, task=task)
    with pytest.raises(ValueError, match=message):
        model.set_params(**changes).save(tmp_path / "model")
    assert not (tmp_path / "model").exists()
