"""Options of the commands of ``fisherfold complete``, each declared once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fisherfold.cli.common import group
from fisherfold.cli.complete.tables import entries_of, feature_table, read_table_of
from fisherfold.cli.options import TABLES, Reading
from fisherfold.cli.voice import option

if TYPE_CHECKING:
    from fisherfold.completion.base import CompletionBase
    from fisherfold.completion.entries import Entries
    from fisherfold.completion.training import SideInformation
    from fisherfold.tables.readers import RatingTable

app = group(
    "Complete a table of ratings, readings or assays with holes, and recommend from it.",
    examples=[
        "fisherfold complete fit ratings.csv --rank 10 -o model/",
        "fisherfold complete recommend model/ 42",
    ],
)

File = Annotated[
    Path,
    typer.Argument(
        help="Ratings: CSV, TSV, '::' or Parquet with row id, column id and value; - reads "
        "standard input."
    ),
]

WEIGHTS = "The column with the importance of each value: 2 counts as two, 0.1 as a tenth of one."

KEYS = "The column with a key of each line: updates leave out lines that come again."

TIMES = "The column with times, numbers or dates such as 2024-05-31 18:00: rows and columns drift."
AUTO_RANKS = (2, 5, 10, 20)
FOR_ALL = ("duplicates", "max_iter")  # options of all models, and those of ratings only
FOR_RATINGS = ("inference", "solver", "offsets", "ridge", "likelihood")


@dataclass
class Columns(Reading):
    """How a table of ratings or pairs is read."""

    columns: str | None = option(
        None,
        "By name or position, as in user,item,rating or 1,2,3.",
        "--columns",
        "-c",
        metavar="NAMES",
        panel=TABLES,
    )
    header: bool | None = option(
        None,
        "The first line names the columns, or is data; unless said, it is data if a field is a "
        "number.",
        "--header/--no-header",
        panel=TABLES,
    )

    def format(self) -> dict[str, Any]:
        """What ``fisherfold.tables.readers`` call these."""
        return super().format() | {"columns": split_names(self.columns), "header": self.header}


@dataclass
class Model:
    """What is fitted, and how."""

    rank: str | None = option(
        None,
        "The number of factors, or auto (cross-validation); found on held-out values if not given.",
        "-r",
    )
    seed: int = option(0, "Seed of everything random.", "-s")
    inference: Literal["variational", "point"] | None = option(
        None, "variational (the default) or point."
    )
    solver: Literal["auto", "rngd", "rngd-vr", "rcg", "rgd"] | None = option(
        None,
        "Of --inference point: auto, or a solver of the paper's problem: rngd, rngd-vr, rcg, rgd.",
    )
    offsets: Literal["both", "rows", "columns", "global", "none"] | None = option(
        None, "both (the default), rows, columns, global or none."
    )
    ridge: float | None = option(None, "Prior strength in pseudo-ratings; learnt if not given.")
    duplicates: Literal["mean", "last", "sum", "error"] | None = option(
        None,
        "For pairs given twice: mean (the default for ratings), sum (with --implicit), last or "
        "error.",
    )
    max_iter: int | None = option(None, "The largest number of passes.")
    likelihood: Literal["gaussian", "ordered", "binary"] | None = option(
        None,
        "gaussian (the default), ordered (values are steps of a scale) or binary (two values).",
    )
    row_features: Path | None = option(
        None, "A table with a column of row ids and, beside it, what is known of them."
    )
    column_features: Path | None = option(
        None, "The same for column ids; fields of several are written as a|b."
    )
    time_column: str | None = option(None, TIMES, metavar="NAME")
    weight_column: str | None = option(None, WEIGHTS, metavar="NAME")
    key_column: str | None = option(None, KEYS, metavar="NAME")
    implicit: bool = option(
        False,
        "Pairs were observed (clicks, plays), values are their weights, if any; what is missing is "
        "no interest.",
    )

    def estimator(self, **more: Any) -> CompletionBase:
        """The estimator of these options; what is not given is its own default."""
        from fisherfold.completion.cross_validation import MatrixCompletionCV
        from fisherfold.completion.implicit import ImplicitCompletion
        from fisherfold.completion.rating_model import MatrixCompletion

        names = FOR_ALL if self.implicit else (*FOR_ALL, *FOR_RATINGS)
        options = {name: getattr(self, name) for name in names}
        options = {name: value for name, value in options.items() if value is not None}
        options |= {"random_state": self.seed, **more}
        if self.implicit:
            self._check_implicit()
            return ImplicitCompletion(**self._rank(), **options)
        if self.rank == "auto":
            return MatrixCompletionCV(AUTO_RANKS, ridges=(options.pop("ridge", None),), **options)
        return MatrixCompletion(**self._rank(), **options)

    def _check_implicit(self) -> None:
        for name in (*FOR_RATINGS, "weight_column", "key_column"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')} is for ratings and has no meaning with --implicit"
                )

    def _rank(self) -> dict[str, Any]:
        if self.rank is None:
            return {}
        if not (self.rank.isdecimal() or self.rank == "auto"):
            raise ValueError(
                f"--rank must be a whole number of at least 1 or auto, got {self.rank!r}"
            )
        return {"rank": int(self.rank) if self.rank.isdecimal() else "auto"}

    @property
    def extras(self) -> tuple[Any, ...]:
        """What is known beside the ratings."""
        columns = self.time_column, self.weight_column, self.key_column
        return (self.row_features, self.column_features, *columns)

    def read(
        self, file: Path, reading: Columns, skip_bad_lines: bool
    ) -> tuple[RatingTable, Entries, SideInformation]:
        """The table for a fit, its entries, features and times."""
        columns = {"time": self.time_column, "weight": self.weight_column, "key": self.key_column}
        table = read_table_of(file, reading, skip_bad_lines, implicit=self.implicit, **columns)
        entries = entries_of(table)
        return table, entries, self._features(entries, reading, skip_bad_lines)

    def _features(
        self, entries: Entries, reading: Columns, skip_bad_lines: bool
    ) -> SideInformation:
        from fisherfold.completion.inference.features import encode_features
        from fisherfold.completion.training import SideInformation

        found = [
            None
            if file is None
            else encode_features(
                feature_table(file, name, side, reading, skip_bad_lines), side, name
            )
            for file, side, name in zip(
                (self.row_features, self.column_features),
                ("row", "column"),
                entries.names[:2],
                strict=True,
            )
        ]
        return SideInformation((found[0], found[1]))


TimeColumn = Annotated[str | None, typer.Option(help=TIMES, metavar="NAME")]
WeightColumn = Annotated[str | None, typer.Option(help=WEIGHTS, metavar="NAME")]
KeyColumn = Annotated[str | None, typer.Option(help=KEYS, metavar="NAME")]
Shown = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="A file for the table: .csv, .csv.gz or .parquet; - prints CSV."
    ),
]

RowFeatures = Annotated[
    Path | None, typer.Option(help="Features of rows that were not in the fit, as for fit.")
]

ColumnFeatures = Annotated[
    Path | None, typer.Option(help="Features of columns that were not in the fit, as for fit.")
]

K = Annotated[int, typer.Option("-k", min=1, help="How many for each id.", metavar="N")]


def split_names(columns: str | None) -> tuple[str, ...] | None:
    """The names of columns that are given in one word."""
    return None if columns is None else tuple(part.strip() for part in columns.split(","))
