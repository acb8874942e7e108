"""Titles of columns for people: read from a file, searched by words."""

from __future__ import annotations

from typing import Any

import polars as pl


class Titles:
    """Titles by column id; without a file, ids are their own titles.

    Args:
        titles: id (as text) to title.
    """

    def __init__(self, titles: dict[str, str] | None = None) -> None:
        self.titles = titles or {}
        self._folded = [(key, title, title.casefold()) for key, title in self.titles.items()]

    @classmethod
    def read(cls, path: str | None) -> Titles:
        """Read a CSV file whose first column is the id and whose second is the title.

        Raises:
            ValueError: if it has fewer than two columns.
        """
        if path is None:
            return cls()
        table = pl.read_csv(path, infer_schema=False)
        if table.width < 2:
            raise ValueError(f"{path} must have two columns, the id and the title")
        ids, titles = (table[name].to_list() for name in table.columns[:2])
        return cls({str(key): str(title) for key, title in zip(ids, titles, strict=True)})

    def search(self, words: str, k: int, model: Any) -> list[tuple[Any, str]]:
        """Ids and titles that contain all words; those that begin with them come first."""
        wanted = words.casefold().split()
        known = {str(column): column for column in model.column_ids_.tolist()}
        pairs = self._folded or [(key, key, key.casefold()) for key in known]
        found = [
            (not folded.startswith(words.casefold().strip()), len(title), known[key], title)
            for key, title, folded in pairs
            if key in known and all(word in folded or word == key for word in wanted)
        ]
        found.sort(key=lambda each: each[:2])
        return [(column, title) for _, _, column, title in found[:k]]

    def of(self, model: Any, columns: dict[str, list[Any]]) -> list[str | None] | None:
        """Titles of the last id in each row of an answer: what is similar, or the column."""
        if not self.titles:
            return None
        name = "similar" if "similar" in columns else model.names_[1]
        if name not in columns:
            return None
        return [self.titles.get(str(key)) for key in columns[name]]
