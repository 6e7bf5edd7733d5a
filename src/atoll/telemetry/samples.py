"""The load of a cluster since it is watched, in a bounded number of samples. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MAX_SAMPLES = 240
_GAP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The load in the interval from `first` to `last`, in seconds of the reader's clock.

    `busy` is the mean fraction of the devices' time that work took. `used_bytes` is the device memory in use, of
    `memory_bytes`, and `waiting` is the number of waiting gangs; both are the highest that was seen.
    """

    first: float
    last: float
    busy: float = 0.0
    used_bytes: int = 0
    memory_bytes: int = 0
    waiting: int = 0

    @property
    def memory(self) -> float:
        """The fraction of the memory in use; 0 if the memory is unknown."""
        return min(1.0, self.used_bytes / self.memory_bytes) if self.memory_bytes else 0.0

    def is_before(self, other: Sample) -> bool:
        """Return whether `other` continues this sample without a gap."""
        return other.first - self.last < _GAP_SECONDS

    def merged(self, other: Sample) -> Sample:
        """Return one sample for this one and `other`, which follows."""
        seconds, more = self.last - self.first, other.last - other.first
        return Sample(
            self.first,
            other.last,
            (self.busy * seconds + other.busy * more) / (seconds + more) if seconds + more else 0.0,
            max(self.used_bytes, other.used_bytes),
            max(self.memory_bytes, other.memory_bytes),
            max(self.waiting, other.waiting),
        )


class Samples:
    """At most `limit` samples, oldest first. When more are added, neighbors are merged, so old samples are coarser."""

    def __init__(self, limit: int = MAX_SAMPLES) -> None:
        self._limit = limit
        self._samples: list[Sample] = []

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples)

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def last(self) -> Sample | None:
        return self._samples[-1] if self._samples else None

    @property
    def seconds(self) -> float:
        """The time from the first sample to the last."""
        return self._samples[-1].last - self._samples[0].first if self._samples else 0.0

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)
        if len(self._samples) > self._limit:
            self._samples = _halved(self._samples)[-self._limit :]


def _halved(samples: list[Sample]) -> list[Sample]:
    """Merge each two neighbors that have no gap between them."""
    found: list[Sample] = []
    is_whole = True  # the last sample of `found` is a pair, or cannot be part of one
    for sample in samples:
        if not is_whole and found[-1].is_before(sample):
            found[-1] = found[-1].merged(sample)
            is_whole = True
        else:
            found.append(sample)
            is_whole = False
    return found
