"""What every completed matrix does after its fit: predict, recommend, compare, give arrays, be saved and loaded.

``CompletionBase`` serves a ``CompletionModel``; how it was fitted is no matter of it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from fisherfold.completion.entries import Codes, Entries, Floats, read_entries, read_pairs
from fisherfold.completion.files import KIND, VERSION, pack, unpack
from fisherfold.completion.inference.features import FeatureColumns, as_times
from fisherfold.completion.model import COLUMNS, UNSEEN, CompletionModel, Pairs
from fisherfold.completion.ratings import Triplets
from fisherfold.completion.recommend import (
    BY,
    Choice,
    Ranking,
    best_columns,
    directions,
    diversified,
    factors,
    inner_product_vectors,
    most_similar,
)
from fisherfold.completion.updating import with_described, with_new_rows
from fisherfold.files import sound
from fisherfold.plain import counted
from fisherfold.tables import validation
from fisherfold.tables.folders import load_folder, model_file, save_folder
from fisherfold.tables.frames import FRAMES, columns_of, frame_kind, make_frame, names_of, numbers
from fisherfold.tables.ids import IdIndex, objects
from fisherfold.tables.roles import check_half_known
from fisherfold.warn import warn

# The parameters that all models have.
SHARED_CHECKS: dict[str, validation.Check] = {
    "rank": validation.integer(1),
    "max_iter": validation.integer(1),
    "tol": validation.number(0),
    "unseen": validation.choice(*UNSEEN),
    "random_state": validation.seed(),
    "device": validation.torch_device(),
    "dtype": validation.torch_dtype(),
    "n_jobs": validation.jobs(),
    "verbose": validation.verbosity(),
}
# Where the class of a file is found by its name.
_HOMES = {
    "MatrixCompletion": "rating_model",
    "MatrixCompletionCV": "cross_validation",
    "ImplicitCompletion": "implicit",
    "ImplicitBlend": "blend",
    "ItemToItem": "item_to_item",
}
_POOL = 5  # times as many columns as are wanted are there for diverse lists to choose from
_MANY = 10  # pairs, of which most are unknown: a mistake rather than a question about new ids


class CompletionBase(BaseEstimator):  # type: ignore[misc]
    """A fitted matrix with holes behind scikit-learn's interface; subclasses fit it.

    Attributes:
        model_: ids, posterior, scale and ratings, for the functions of ``fisherfold.completion``.
        names_: the names of the columns of row ids, column ids and values.
        frame_: the library of the data frame that was fitted.
    """

    unseen: str
    duplicates: str
    random_state: Any
    model_: CompletionModel
    names_: tuple[str, str, str]
    frame_: str | None
    _checks: ClassVar[Mapping[str, validation.Check]] = {}
    _clips = False  # whether predictions stay within the range of the values
    # How a model of the class is ranked, compared, folded in, and taken apart for a file.
    _ranking: ClassVar[Callable[..., Any]] = Ranking
    _directions = staticmethod(directions)
    _most_similar = staticmethod(most_similar)
    _with_new_rows = staticmethod(with_new_rows)
    _pack = staticmethod(pack)
    _unpack = staticmethod(unpack)

    @property
    def merge_rule(self) -> str:
        """What becomes of pairs given twice."""
        return self.duplicates

    def _adopt(self, model: CompletionModel, entries: Entries | None = None) -> None:
        """Make a fitted model this estimator's own, with the names and the frame of its entries."""
        if entries is not None:
            self._set_names(entries)
        self.model_ = model
        self.trace_, self.n_iter_ = model.posterior.trace, len(model.posterior.trace)
        self.converged_, self.n_duplicates_ = model.posterior.converged, model.n_merged

    def _set_names(self, entries: Entries) -> None:
        self.names_, self.frame_ = entries.names, entries.frame
        self.__dict__.pop("feature_names_in_", None)
        self.__dict__.pop("n_features_in_", None)
        if not entries.is_matrix:
            self.n_features_in_ = 2
        if entries.frame is not None:
            self.feature_names_in_ = np.array(entries.names[:2], dtype=object)

    def _fitted(self) -> CompletionModel:
        check_is_fitted(self, "model_")
        return self.model_

    def _read(self, X: Any, y: Any = None, *, columns: Any = None, matrix: Any = None) -> Entries:
        """Entries of a fit."""
        return read_entries(X, y, columns=columns, matrix=matrix)

    def _read_more(
        self, X: Any, y: Any = None, *, columns: Any = None, matrix: Any = None
    ) -> Entries:
        """Entries for a model: the columns of a data frame are those with the names of the fit, if it has them."""
        if columns is None:
            columns = self._columns_of(X, 3 if y is None else 2)
        return self._read(X, y, columns=columns, matrix=matrix)

    def _columns_of(self, X: Any, n: int = 2) -> list[Any] | None:
        """The columns of a data frame that have the names of the fit."""
        if self.frame_ is None or frame_kind(X) is None:
            return None
        given = {str(name): name for name in names_of(X)}
        check_half_known(list(given), self.names_)
        known = self.names_[:n]
        return [given[name] for name in known] if set(known) <= set(given) else None

    def predict(
        self,
        X: Any,
        *,
        return_std: bool = False,
        time: Any = None,
        row_features: Any = None,
        column_features: Any = None,
    ) -> Floats | tuple[Floats, Floats]:
        """Predict entries.

        Args:
            X: (n, 2) row and column ids; of a data frame the columns with the names of the fit.
            return_std: whether the predictive standard deviations are returned as well (``variational`` only).
            time: when, as for ``fit``, or one time for all pairs; without it drift counts as zero.
            row_features: what is known of rows that were not in the fit, as for ``fit`` (ids of
                the fit stay as they were fitted); the model must have been fitted with features.
            column_features: the same for the columns.

        Returns:
            The predictions, or predictions and standard deviations.
        """
        self._fitted()
        pairs = self._knowing(row_features, column_features)._pairs(X, time)
        return self._predict(pairs, return_std)

    def _knowing(self, row_features: Any = None, column_features: Any = None) -> CompletionBase:
        """This model, knowing ids that were not in the fit by their features."""
        if row_features is None and column_features is None:
            return self
        features = self._encoded(row_features, "row"), self._encoded(column_features, "column")
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.model_ = with_described(self.model_, features)
        return other

    def _encoded(self, features: Any, side: str) -> FeatureColumns | None:
        """Features as those of the fit were encoded."""
        if features is None:
            return None
        k = ("row", "column").index(side)
        if (encoder := self.model_.encoders[k]) is None:
            raise ValueError(
                f"this model was fitted without {side}_features: fit it with features to use them"
            )
        return encoder.encode(features, side, self.names_[k])

    def _predict(self, pairs: Pairs, return_std: bool) -> Floats | tuple[Floats, Floats]:
        if return_std:
            self._check_error_bars("return_std")
        mean = self._hide_unseen(pairs, pairs.predict(clip=self._clips))
        return (mean, self._hide_unseen(pairs, pairs.deviations())) if return_std else mean

    def _hide_unseen(self, pairs: Pairs, values: Floats) -> Floats:
        """NaN for pairs with an unknown id, where that is asked for."""
        if self.unseen == "nan":
            values[pairs.unknown] = np.nan
        return values

    def _pairs(self, X: Any, time: Any = None) -> Pairs:
        rows, columns, _, _ = read_pairs(X, self._columns_of(X))
        i, j = self._located(rows, columns)
        if time is None:
            return self.model_.pairs(i, j)
        if isinstance(time, str) and frame_kind(X) is not None and time in names_of(X):
            time = columns_of(X)[time]
        if np.ndim(time) == 0:
            return self.model_.pairs(i, j, np.full(len(i), as_times([time], 1)[0]))
        return self.model_.pairs(i, j, as_times(time, len(i)))

    def _located(self, rows: Any, columns: Any) -> tuple[Codes, Codes]:
        """Numbers of pairs, with a warning where most of them are unknown."""
        i, j = self._locate(rows, "row"), self._locate(columns, "column")
        for name, codes in (("row", i), ("column", j)):
            unknown = int((codes < 0).sum())
            if self.unseen == "prior" and len(codes) >= _MANY and unknown > len(codes) / 2:
                warn(
                    f"the {name} ids of {unknown} of {len(codes)} pairs were not seen in fit and are predicted as "
                    f"average ones; if these are folds of ratings sorted by {name}, shuffle them: KFold(shuffle=True)"
                )
        return i, j

    def _locate(self, ids: Any, side: str) -> Codes:
        return self.model_.locate(ids, side, self.unseen)

    def _check_error_bars(self, what: str) -> None:
        if self.model_.inference == "point":
            raise ValueError(
                f"{what} needs inference='variational': a point estimate has no error bars"
            )
        if not self.model_.has_spread:
            raise ValueError(
                f"{what} needs the covariances of the rows, which a slim model does not keep: save "
                "it without slim"
            )

    def recommend(
        self,
        ids: Any = None,
        k: int = 10,
        *,
        candidates: Any = None,
        exclude: Any = None,
        boosts: Mapping[Any, float] | None = None,
        diversity: float = 0.0,
        exclude_seen: bool = True,
        by: str = "mean",
        seed: int | None = None,
        time: Any = None,
        row_features: Any = None,
        column_features: Any = None,
    ) -> Any:
        """The columns with the largest predictions for some rows.

        Args:
            ids: one row id, a sequence of them, or None for all rows; one that was never seen gets what an average row
                would, or nothing, with a warning, if ``unseen`` is ``nan``.
            k: how many columns for each row.
            candidates: the ids of the columns to choose from, or a mapping from each row id to
                its own; all if not given. Without ``ids`` the rows of such a mapping get lists.
            exclude: ids of columns that no list may hold; unknown ones are ignored, with a warning.
            boosts: ``{column id: amount}`` to add to scores, in units of the values.
            diversity: from 0, the best columns, to 1, those least like each other (by ``similar``): lists
                are chosen by maximal marginal relevance from five times as many, and in that order.
            exclude_seen: whether columns in which the row has a value are left out.
            by: ``mean``; ``upper``, the 95 % quantile of the expected score, which favours what is not known yet; or
                ``sample``, one draw from the posterior (Thompson sampling).
            seed: of the draw; a new one every time if not given.
            time: when the lists are for, of a model with times; without it drift counts as zero.
            row_features: what is known of rows that were not in the fit, as for ``predict``.
            column_features: the same for the columns, which lists may then hold.

        Returns:
            A data frame of row id, column id and ``prediction`` (that of ``predict``), best first within each row;
            fewer than ``k`` of a row if there are no more. What ``upper``, ``sample`` and boosts rank by is the column
            ``score``. The frame is of the library of the data frame that was fitted, else of polars.
        """
        self._fitted()
        served = self._knowing(row_features, column_features)
        model = served.model_
        if ids is None and isinstance(candidates, Mapping):
            ids = list(candidates)
        rows = model.row_ids.labels if ids is None else [ids] if np.ndim(ids) == 0 else ids
        i = np.arange(len(rows)) if ids is None else served._locate(rows, "row")
        if self.unseen == "nan" and (i < 0).any():
            every = np.asarray(rows, dtype=object)
            unknown, rows, i = every[i < 0], every[i >= 0], i[i >= 0]
            warn(
                f"{counted(len(unknown), 'row id was', 'row ids were')} not seen in fit and get no list "
                f"(unseen='nan'), the first is {unknown[0]!r}"
            )
        choice = served._choice(candidates, exclude, rows, boosts)
        options = {"choice": choice, "exclude_seen": exclude_seen, "by": by, "seed": seed}
        options["diversity"] = diversity
        return served._best(model, i, rows, k, options, time)

    def _best(
        self,
        model: CompletionModel,
        i: Codes,
        rows: Any,
        k: int,
        options: dict[str, Any],
        time: Any = None,
    ) -> Any:
        """Lists for rows, with their ids if there are any."""
        k = validation.integer(1)("k", k)
        by = validation.choice(*BY)("by", options["by"])
        if by != "mean":
            self._check_error_bars(f"by={by!r}")
        options = options | {"seed": validation.draw_seed(options["seed"])}
        at = None if time is None else as_times([time], 1)
        when = None if at is None else model.checked_times(at)
        diversity = validation.number(0, 1)("diversity", options.pop("diversity"))
        pool = _POOL * k if diversity else k
        found = best_columns(model, i, pool, ranking=type(self)._ranking, when=when, **options)
        if diversity:
            fit = self.model_  # a model of new rows knows too few to compare columns by
            table = fit.keep("directions 1", lambda: self._directions(fit, COLUMNS))
            found = diversified(found, k, diversity, table)
        times = None if at is None else np.repeat(at, len(found.place))
        pairs = model.pairs(i[found.place], found.columns, times)
        predictions = pairs.predict(clip=self._clips)
        owner = {} if rows is None else {self.names_[0]: np.asarray(rows)[found.place]}
        items = {self.names_[1]: model.column_ids.decode(found.columns)}
        plain = by == "mean" and options["choice"].boosted is None
        scores = {} if plain else {"score": found.scores}
        return self._output(owner | items | {"prediction": predictions} | scores)

    def _choice(self, candidates: Any, exclude: Any, rows: Any, boosts: Any = None) -> Choice:
        """Which columns the lists of some rows may hold."""
        own, excluded, boosted, amounts = None, None, None, None
        if isinstance(candidates, Mapping):
            own = self._own_candidates(candidates, rows)
            candidates = [each for ids in candidates.values() for each in ids]
        if exclude is not None:
            codes = self._ignoring([exclude] if np.ndim(exclude) == 0 else exclude, "exclude")
            excluded = np.unique(codes[codes >= 0])
        if boosts is not None:
            codes, amounts = (
                self._ignoring(list(boosts), "boosts"),
                numbers(list(boosts.values()), "boosts"),
            )
            if not np.isfinite(amounts).all():
                raise ValueError("boosts must be finite; use exclude to leave columns out")
            boosted, amounts = codes[codes >= 0], amounts[codes >= 0]
        columns = None if candidates is None else self._known_columns(candidates)
        if columns is not None and not len(columns):
            raise ValueError(
                "none of the candidates was seen in fit, there is nothing to recommend"
            )
        return Choice(columns, own, excluded, boosted, amounts)

    def _ignoring(self, ids: Any, what: str) -> Codes:
        """The numbers of columns, with a warning of unknown ones."""
        codes = self.model_.column_ids.encode(ids)
        if unknown := int((codes < 0).sum()):
            count = counted(unknown, "id", "ids")
            warn(f"{count} of {what}, of {len(codes)}, not seen in fit: ignored")
        return codes

    def _own_candidates(self, candidates: Mapping[Any, Any], rows: Any) -> list[Codes]:
        """The candidates of each of some rows."""
        if rows is None:
            raise ValueError("candidates must be one list for one new row without an id")
        index, codes = IdIndex.fit(list(candidates))
        lists = dict(
            zip(codes.tolist(), map(self._known_columns, candidates.values()), strict=True)
        )
        place = index.encode(rows)
        if (place < 0).any():
            missing = np.asarray(rows, dtype=object)[place < 0]
            raise ValueError(
                f"candidates must have a list for each row id, none for {len(missing)} of "
                f"{len(place)}, the first is {missing[0]!r}; or give one list for all"
            )
        return [lists[each] for each in place.tolist()]

    def _known_columns(self, ids: Any) -> Codes:
        """The numbers of the known ones among columns, ascending."""
        found = np.unique(self._locate(ids, "column"))
        return found[found >= 0]

    def _output(self, columns: dict[str, Any]) -> Any:
        return make_frame(self.frame_ or "polars", columns)

    def recommend_new(
        self,
        ratings: Any,
        k: int = 10,
        *,
        candidates: Any = None,
        exclude: Any = None,
        boosts: Mapping[Any, float] | None = None,
        diversity: float = 0.0,
        exclude_seen: bool = True,
        by: str = "mean",
        seed: int | None = None,
        features: Any = None,
        column_features: Any = None,
    ) -> Any:
        """Recommend to rows that were not in the fit, from a few of their values; the model does not change.

        ``ratings`` are ``{column id: value}`` of one new row, or a data frame of entries as for
        ``fit`` of several; unknown columns are left out, with a warning. ``features`` are
        ``{name: value}`` of one new row (a line of numbers, if those of the fit were a matrix), or a
        table of several as for ``fit``. The other arguments are those of ``recommend``, whose frame
        this returns; of one new row without the column of row ids.
        """
        self._fitted()
        served, rows = self._knowing(None, column_features), None
        if isinstance(ratings, Mapping):
            values = numbers(list(ratings.values()), "ratings")
            model, _, _ = served._folded(None, list(ratings), values, features)
        else:
            given = self._read_more(ratings)
            model, rows, _ = served._folded(given.rows, given.columns, given.values, features)
        i = np.arange(1 if rows is None else len(rows))
        choice = served._choice(candidates, exclude, rows, boosts)
        options = {"choice": choice, "exclude_seen": exclude_seen, "by": by, "seed": seed}
        options["diversity"] = diversity
        return served._best(model, i, rows, k, options)

    def _folded(
        self, rows: Any, columns: Any, values: Floats, features: Any = None
    ) -> tuple[CompletionModel, Any, Tensor | None]:
        """A model of new rows, or of one without an id, their ids and their encoded features.

        Columns that were not seen are left out, with a warning.
        """
        if not np.isfinite(values).all():
            raise ValueError(f"the values must be finite, got {values[~np.isfinite(values)][0]}")
        index, i = IdIndex.fit(np.zeros(len(values), dtype=np.int64) if rows is None else rows)
        known = (j := self._locate(columns, "column")) >= 0
        if not known.all():
            first = np.asarray(columns, dtype=object)[~known][0]
            if not known.any():
                raise ValueError(
                    f"none of the rated column ids was seen in fit, the first is {first!r}: nothing is known"
                )
            unknown = counted(int((~known).sum()), "rated column id was", "rated column ids were")
            warn(f"{unknown} not seen in fit and left out, of {len(known)}; the first is {first!r}")
        ids = index, self.model_.column_ids
        entries = Triplets(i[known], j[known], values[known]).merged(self.merge_rule, ids)
        count = 1 if rows is None else len(index)
        table = self._table_of(features, None if rows is None else index)
        return self._with_new_rows(self.model_, count, entries, table), index.labels, table

    def _table_of(self, features: Any, index: IdIndex | None) -> Tensor | None:
        """The encoded features of new rows, average ones where there are none, or of one without an id."""
        if features is None:
            return None
        if index is None:
            features = _one_line(features, self.names_[0])
        elif isinstance(features, Mapping) and all(np.ndim(v) == 0 for v in features.values()):
            raise ValueError(
                "features of several new rows must be a data frame with their ids, got one line"
            )
        if (given := self._encoded(features, "row")) is None:
            return None
        if index is None:
            return torch.from_numpy(given.table)
        codes = index.encode(given.ids)
        table = np.zeros((len(index), given.table.shape[1]))
        table[codes[codes >= 0]] = given.table[codes >= 0]
        return torch.from_numpy(table)

    def predict_new(
        self,
        rated: Any,
        values: Any,
        wanted: Any,
        *,
        return_std: bool = False,
        features: Any = None,
        column_features: Any = None,
    ) -> Floats | tuple[Floats, Floats]:
        """Predict for a new row from a few of its values, without changing the model.

        Args:
            rated: the ids of the columns in which the row has values; unknown ones are left out, with a warning.
            values: these values.
            wanted: the ids of the columns to predict.
            return_std: whether standard deviations are returned as well.
            features: of the row, as for ``recommend_new``.
            column_features: what is known of columns that were not in the fit, as for ``predict``.

        Returns:
            The predictions, or predictions and standard deviations.
        """
        self._fitted()
        given = numbers(values, "values")
        if len(rated) != len(given):
            raise ValueError(
                f"rated and values must have one length, got {len(rated)} and {len(given)}"
            )
        served = self._knowing(None, column_features)
        model, _, _ = served._folded(None, rated, given, features)
        j = served._locate(wanted, "column")
        return self._predict(model.pairs(np.zeros_like(j), j), return_std)

    def similar(self, ids: Any, k: int = 10, *, of: str = "columns") -> Any:
        """The columns that are rated most like others: correlation of their predicted values, apart from level.

        Args:
            ids: one id, or a sequence of them.
            k: how many for each.
            of: ``columns`` or ``rows``.

        Returns:
            A data frame of the id, the ``similar`` id and the ``similarity``, best first.
        """
        model, k = self._fitted(), validation.integer(1)("k", k)
        side = ("rows", "columns").index(validation.choice("rows", "columns")("of", of))
        asked = [ids] if np.ndim(ids) == 0 else ids
        index = model.ids[side]
        members = index.encode(asked)
        if (members < 0).any():
            unknown = np.asarray(asked, dtype=object)[members < 0]
            raise ValueError(
                f"{counted(len(unknown), f'{of[:-1]} id was', f'{of[:-1]} ids were')} not seen in fit, the first is "
                f"{unknown[0]!r}: there is nothing to compare"
            )
        place, found, similarity = self._most_similar(model, members, k, side=side)
        own = index.decode(members[place])
        return self._output(
            {self.names_[side]: own, "similar": index.decode(found), "similarity": similarity}
        )

    def save(self, path: str | os.PathLike[str], *, slim: bool = False) -> None:
        """Write the model into a folder: ``model.safetensors`` and a readable ``model.json``; no pickle.

        Args:
            path: the folder; it is made if it does not exist.
            slim: leave out the ratings and, where predictions do not need them, the covariances of
                the rows. Such a model predicts, recommends with ``exclude_seen=False`` and takes
                new rows as before; it has no error bars of rows, and cannot be updated.
        """
        arrays, meta = self._pack(self._fitted(), slim=slim)
        params = validation.saved_parameters(self.get_params(deep=False))
        meta |= {"estimator": type(self).__name__, "params": params, **self._learnt()}
        save_folder(path, KIND, arrays, meta, version=VERSION)

    def _learnt(self) -> dict[str, Any]:
        """What a file keeps besides the model and the parameters."""
        return {"names": list(self.names_), "frame": self.frame_}

    def _recall(self, meta: Mapping[str, Any]) -> None:
        """Take back what ``_learnt`` gave."""
        names, frame = meta.get("names"), meta.get("frame")
        if not (
            isinstance(names, list)
            and len(names) == 3
            and all(isinstance(name, str) for name in names)
        ):
            raise ValueError(f"names are {str(names)[:40]!r}, three names are expected")
        if frame is not None and frame not in FRAMES:
            raise ValueError(f"frame is {str(frame)[:40]!r}")
        self._set_names(Entries([], [], np.zeros(0), (names[0], names[1], names[2]), frame))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: str | None = None) -> Any:
        """Read a model that ``save`` wrote.

        Args:
            path: the folder.
            device: where the model is to compute.

        Returns:
            The fitted estimator, of the class that was saved.
        """
        arrays, meta = load_folder(path, KIND, version=VERSION)
        return cls.restore(arrays, meta, source=model_file(path), device=device)

    @classmethod
    def restore(
        cls,
        arrays: Mapping[str, Any],
        meta: Mapping[str, Any],
        *,
        source: str | os.PathLike[str],
        device: str | None = None,
    ) -> Any:
        """Put an estimator together from what its file holds.

        Args:
            arrays: tensors by name.
            meta: what the file keeps beside them.
            source: the file, for messages.
            device: where the model is to compute.

        Returns:
            The fitted estimator, of the class that was saved.
        """
        with sound(source, KIND):
            made = _class_named(meta.get("estimator"))
            model = made._unpack(arrays, meta, str(validation.torch_device()("device", device)))
            params = validation.loaded_parameters(meta.get("params"), made._checks)
            estimator = made(**params)
            estimator.device = device
            estimator._recall(meta)
        estimator._adopt(model)
        return estimator

    def __getstate__(self) -> dict[str, Any]:
        """Plain arrays and numbers, so that any pickler (mlflow, skops, joblib) can take them."""
        state = dict(super().__getstate__())
        if (model := state.pop("model_", None)) is not None:
            arrays, meta = self._pack(model)
            state |= {"model_arrays_": arrays, "model_meta_": meta}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays, meta = state.pop("model_arrays_", None), state.pop("model_meta_", None)
        super().__setstate__(state)
        if arrays is not None:
            self._adopt(self._unpack(arrays, meta))

    offset_ = property(lambda self: float(self._fitted().center))
    row_ids_ = property(lambda self: self._fitted().row_ids.labels)
    column_ids_ = property(lambda self: self._fitted().column_ids.labels)
    row_factors_ = property(lambda self: factors(self._fitted(), 0)[0])
    column_factors_ = property(lambda self: factors(self._fitted(), 1)[0])
    row_offsets_ = property(lambda self: factors(self._fitted(), 0)[1])
    column_offsets_ = property(lambda self: factors(self._fitted(), 1)[1])
    row_covariances_ = property(lambda self: self._row_covariances())
    column_covariances_ = property(lambda self: factors(self._fitted(), 1)[2])

    def decision_function(self, X: Any, *, time: Any = None) -> Floats:
        """The latent scores of pairs: ``offset_`` + offsets + product of factors, never clipped.

        Args:
            X: (n, 2) row and column ids.
            time: as for ``predict``.

        Returns:
            One score per pair: the prediction of measured values before it is clipped; of ordered categories the mean
            of the latent value that the cut points cut.
        """
        self._fitted()
        pairs = self._pairs(X, time)
        return self._hide_unseen(pairs, pairs.scores())

    def _row_covariances(self) -> Floats:
        if not self._fitted().has_spread:
            raise AttributeError("a slim model does not keep row_covariances_")
        return factors(self.model_, 0)[2]

    def inner_product_vectors(self) -> tuple[Floats, Floats]:
        """Vectors for a nearest-neighbour index: their inner products are the scores, offsets included.

        Returns:
            One float32 vector per row and one per column, in the order of ``row_ids_`` and ``column_ids_``.
        """
        return inner_product_vectors(self._fitted())

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        tags.input_tags.allow_nan = True
        tags.target_tags.required = False
        return tags


def _one_line(features: Any, id_name: str) -> Any:
    """A table of the features of one row."""
    if not isinstance(features, Mapping):
        return [0], np.asarray(features, dtype=np.float64)[None]
    line: dict[str, Any] = {id_name: np.zeros(1, dtype=np.int64)}
    for name, value in features.items():
        several = isinstance(value, (list, tuple))
        line[str(name)] = objects([value]) if several else np.array([value])
    return line


def _class_named(name: Any) -> type[CompletionBase]:
    """The class of a model file."""
    if name not in _HOMES:
        raise ValueError(f"estimator is {str(name)[:40]!r}, one of {', '.join(_HOMES)} is expected")
    module = importlib.import_module(f"fisherfold.completion.{_HOMES[name]}")
    found: type[CompletionBase] = getattr(module, name)
    return found
