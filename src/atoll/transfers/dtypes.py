"""NumPy dtypes by their names in the IR."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from atoll.errors import invalid


@lru_cache(256)
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of an IR dtype name. Raise INVALID_ARGUMENT if arrays of the dtype hold no data."""
    if name in ("token", "opaque"):
        raise invalid(f"arrays of dtype {name} hold no data")
    if name == "string":
        return np.dtypes.StringDType()
    return np.dtype(getattr(ml_dtypes, name, name))  # XLA and ml_dtypes use the same names


@lru_cache(256)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the `name` of a dtype, which takes NumPy about 5 us per call."""
    return dtype.name
