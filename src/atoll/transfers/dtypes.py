"""NumPy dtypes for the names that the IR gives to them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from atoll.errors import invalid


# XLA's names for the dtypes that NumPy has no name for are ml_dtypes' own.
@lru_cache(256)
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of an IR dtype name; raises INVALID_ARGUMENT for one that no array can have."""
    if name in ("token", "opaque"):
        raise invalid(f"arrays of dtype {name} hold no data")
    if name == "string":
        return np.dtypes.StringDType()
    return np.dtype(getattr(ml_dtypes, name, name))


@lru_cache(256)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Its `name`, which NumPy makes anew each time, at some 5 us."""
    return dtype.name
