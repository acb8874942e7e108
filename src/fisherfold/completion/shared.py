"""``MatrixCompletion`` over several processes: each brings its share of the table, all get the same model."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import Self

from fisherfold.completion.fit import FitOptions, fit_model
from fisherfold.completion.shared_ratings import NoRatings, Share, joint_counts
from fisherfold.distributed import Group, current_group
from fisherfold.plain import counted
from fisherfold.tables.inputs import observations
from fisherfold.tables.shared_options import check_agreement

if TYPE_CHECKING:
    from fisherfold.completion.model import CompletionModel


class SharedFits:
    """The fits of an estimator together with other processes of ``torch.distributed``."""

    if TYPE_CHECKING:
        on_interrupt: str
        device: str | None
        rank: int
        ridge: float | None

        def get_params(self, deep: bool = ...) -> dict[str, Any]: ...  # noqa: D102
        def _validate(self) -> None: ...
        def _options(self, rank: int, ridge: float | None) -> FitOptions: ...
        def _adopt(self, model: CompletionModel, interrupted: bool) -> Self: ...

    def fit_share(self, X: Any = None, y: Any = None, *, process_group: Any = None) -> Self:
        """Fit the model to the shares of all processes of a group; every one of them must call this.

        The model is that of one process which is given all shares one after the other, to rounding, and the same on
        every process to the bit. Ids must be numbers or text; where a share has text, the whole numbers of all others
        are names too, as in a file that is read in parts.

        Args:
            X: this process's share, as for ``fit``; None if it has none.
            y: as for ``fit``.
            process_group: a group of ``torch.distributed``; its default group if not given.

        Returns:
            This estimator.
        """
        group = self._group(process_group)
        nothing = np.zeros(0, dtype=np.int64)
        share = Share(lambda: iter(()), nothing, nothing)
        with group.together():
            if X is not None and not (y is not None and len(y) == 0):
                share = Share.of(observations(X, y))
        return self._fit_shared(share, group)

    def fit_file_share(
        self, path: str | os.PathLike[str], *, columns: tuple[str, ...] | None = None, file_format: str | None = None,
        header: bool | None = None, decimal: str | None = None, process_group: Any = None,
    ) -> Self:  # fmt: skip
        """Fit the model to a file of which each process of a group reads a part; every one of them must call this.

        Sets ``n_read_``, ``refused_``, ``header_`` and ``decimal_``: the lines of the whole file, those of them that
        could not be used, by reason, the names in the first line, and the decimal mark; and ``columns_read_`` and
        ``columns_unexplained_``: the names of the three columns, and of others that are no times.

        Args:
            path: a CSV, TSV, ``::`` or Parquet file with row ids, column ids and values, not compressed as a whole.
            columns: the three columns by name or by position from 1; the first three if not given.
            file_format: ``csv``, ``tsv``, ``::`` or ``parquet``; found out if not given.
            header: whether the first line names the columns; found out if not given.
            decimal: the decimal mark of the values, ``.`` or ``,``; found out from all of them if not given.
            process_group: a group of ``torch.distributed``; its default group if not given.

        Returns:
            This estimator.

        Raises:
            ValueError: if no line of the file can be used.
        """
        from fisherfold.tables.file_shares import FileShare, RatingShare

        how = {"columns": columns, "file_format": file_format, "header": header, "decimal": decimal}
        group = self._group(process_group, **how)
        file = FileShare(Path(path), group, file_format=file_format, header=header, decimal=decimal)
        ratings = RatingShare(file, group, columns)
        try:
            self._fit_shared(Share(ratings.batches), group)
        except NoRatings:
            refused = joint_counts({"lines": ratings.n_read, **ratings.refused}, group)
            why = ", ".join(f"{count} {reason}" for reason, count in refused.items() if reason != "lines")
            raise ValueError(
                f"{path}: none of {counted(refused['lines'], 'line')} can be used ({why or 'no lines'})"
            ) from None
        found = joint_counts({"lines": ratings.n_read, **ratings.refused}, group)
        self.n_read_ = found.pop("lines")
        if file.header is not None:
            self.feature_names_in_ = np.array(ratings.names[:2], dtype=object)
        self.refused_, self.header_, self.decimal_ = found, file.header, ratings.decimal
        self.columns_read_, self.columns_unexplained_ = ratings.names, ratings.unexplained
        return self

    def _group(self, process_group: Any, **reading: Any) -> Group:
        """The processes, once all of them have found their options usable and the same."""
        group = current_group(process_group)
        with group.together():
            self._validate()
            if not hasattr(self, "rank"):
                raise ValueError("over several processes the rank must be given; choose it in one process, on a part")
            if self.on_interrupt != "raise" or (self.device or "cpu") != "cpu":
                raise ValueError(
                    "over several processes on_interrupt must be 'raise' and device 'cpu', "
                    f"got {self.on_interrupt!r} and {self.device!r}"
                )
        options = {name: value for name, value in self.get_params(deep=False).items() if name != "random_state"}
        check_agreement(options | reading, group)  # the seed is that of the first process
        return group

    def _fit_shared(self, share: Share, group: Group) -> Self:
        options = self._options(self.rank, self.ridge)
        seed = int(group.gather_texts(str(options.seed))[0])
        model = fit_model(share, replace(options, group=group, seed=seed))
        self.n_features_in_ = 2
        self.__dict__.pop("feature_names_in_", None)  # of an earlier fit to a data frame
        return self._adopt(*model)
