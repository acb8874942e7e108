"""Values as JSON holds them and as sentences say them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def finite(value: Any) -> Any:
    """Plain data without NaN and infinities, which JSON does not know: they become null.

    Args:
        value: numbers, strings, sequences and mappings.

    Returns:
        The same of lists and dicts.

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
