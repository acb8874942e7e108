"""Values as JSON holds them and as sentences say them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def finite(value: Any) -> Any:
    """Plain data without NaN and infinities, which JSON does not know: they become null.

    Examples:
        >>> finite({"a": (1.5, float("nan"))})
        {'a': [1.5, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def counted(count: int, one: str, many: str = "", *, form: str = "") -> str:
    """A number with the noun that it counts, in the plural with an s if no other is given.

    Examples:
        >>> counted(1, "epoch"), counted(0, "epoch"), counted(1000, "row", form=",")
        ('1 epoch', '0 epochs', '1,000 rows')
        >>> counted(1, "entry is", "entries are"), counted(2, "entry is", "entries are")
        ('1 entry is', '2 entries are')
    """
    return f"{count:{form}} {one if count == 1 else many or one + 's'}"
