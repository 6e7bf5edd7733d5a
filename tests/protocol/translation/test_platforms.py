"""XLA's numbers for platforms."""

from __future__ import annotations

from itertools import pairwise

import pytest

from atoll.protocol.translation.platforms import platform_id


@pytest.mark.parametrize(
    ("text", "signed"),
    [
        # Published values of the same hash (FARM_FINGERPRINT in BigQuery's reference): one for each of its lengths.
        ("foo", 6150913649986995171),
        ("3true", -4880158226897771312),
        ("1footrue", -1541654101129638711),
        ("2applefalse", 2794438866806483259),
    ],
)
def test_the_number_of_a_platform_is_its_names_farm_fingerprint(text, signed):
    assert platform_id(text) == signed % (1 << 64)


def test_the_numbers_of_platforms_differ():
    numbers = sorted(platform_id(name) for name in ("cpu", "cuda", "rocm", "tpu", "METAL", ""))
    assert all(a < b for a, b in pairwise(numbers))
