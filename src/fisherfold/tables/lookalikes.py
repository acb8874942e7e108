"""Ids that are the same number in another spelling: 1 and 01, +7 and 7, 2.50 and 2.5.

A table keeps its ids as they are written, and 01 is another id than 1. Where one of them is asked for and the other is
known, somebody has lost the zeros on the way, and a prediction for a stranger is not what is wanted.
"""

from __future__ import annotations

import re
from typing import Any

from fisherfold.tables.ids import IdIndex, Ids

_NUMBER = re.compile(r"[+-]?[0-9]{1,300}(\.[0-9]*)?")  # of more digits nobody has lost zeros, and Python refuses some


def lookalikes(index: IdIndex, ids: Ids) -> dict[Any, Any]:
    """Ids that are not known while the same number in another spelling is.

    Args:
        index: the known ids.
        ids: ids as made by ``id_array``.

    Returns:
        The unknown ones, each with the known one.

    Examples:
        >>> from fisherfold.tables.ids import id_array
        >>> known = IdIndex(id_array(["01", "12", "3A"], "row"))
        >>> lookalikes(known, id_array(["01", "1", "12.0", "99", "3"], "row"))
        {'1': '01', '12.0': '12'}
    """
    unknown = ids[index.numbers(ids) < 0].tolist()
    numbers = {given: number for given in unknown if (number := as_number(given)) is not None}
    wanted, spelt = set(numbers.values()), dict[float, Any]()
    for label in index.labels.tolist() if wanted else ():
        number = as_number(label)
        if number in wanted:
            spelt.setdefault(number, label)
    return {given: spelt[number] for given, number in numbers.items() if number in spelt}


def as_number(label: Any) -> float | None:
    """The number that an id is, however it is spelt.

    Args:
        label: an id.

    Returns:
        A whole number exactly, or a float; None for all other ids.

    Examples:
        >>> as_number("007"), as_number("2.50"), as_number("1_0"), as_number("3A")
        (7, 2.5, None, None)
    """
    if isinstance(label, str):
        found = _NUMBER.fullmatch(label)
        return None if found is None else float(label) if found[1] else int(label)
    return label if isinstance(label, int | float) else None
