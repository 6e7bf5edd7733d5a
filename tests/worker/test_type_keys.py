"""Types by number."""

from __future__ import annotations

from atoll.worker.type_keys import TypeKeys


def test_equal_types_have_equal_keys_and_others_have_others():
    keys = TypeKeys()
    types = [
        ("float32", ((2,), (2,)), (0, 1)),
        ("int32", ((2,), (2,)), (0, 1)),
        ("float32", ((2,), (3,)), (0, 1)),
        ("float32", ((2,), (2,)), (1, 0)),  # executables care for the order of devices
        ("float32", ((2,),), (0,)),
        ("float32", ((),), (0,)),
        ("float32", ((2, 3),), (0,), None),
        ("float32", ((2, 3),), (0,), (1, 0)),
    ]
    numbers = [keys.of(*each) for each in types]
    assert len(set(numbers)) == len(types)
    assert [keys.of(*each) for each in types] == numbers


def test_a_type_is_described_in_a_users_words():
    keys = TypeKeys()
    even = keys.of("float32", ((2, 3), (2, 3)), (0, 1))
    uneven = keys.of("int8", ((2,), (3,)), (0, 1))
    assert keys.describe(even) == "float32[2, 3] on local devices [0, 1]"
    assert "(2,), (3,)" in keys.describe(uneven)
    turned = keys.of("int8", ((2, 3),), (0,), (1, 0))
    assert keys.describe(turned) == "int8[2, 3] with dimensions in the order [1, 0] on local devices [0]"
    assert keys.layout(turned) == (1, 0)
