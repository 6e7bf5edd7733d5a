"""Tests that a misspelled environment variable is reported."""

from __future__ import annotations

import pytest

from atoll.cluster.environment_variables import TABLES
from atoll.cluster.misspelled_variables import misspelled_variables
from atoll.cluster.settings import SETTINGS


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ATOLL_POLCY", "ATOLL_POLICY"),
        ("ATOLL_ADRESS", "ATOLL_ADDRESS"),
        ("ATOLL_DEVICE_MEMROY", "ATOLL_DEVICE_MEMORY"),
        ("ATOLL_JOINS", "ATOLL_JOIN"),
    ],
)
def test_a_misspelled_variable_is_reported_with_the_name_that_was_meant(name: str, meant: str) -> None:
    assert misspelled_variables({name: "1"}) == [
        f"the environment variable {name} has no effect; did you mean {meant}?"
    ]


def test_a_shape_in_the_variable_for_the_number_of_an_island_is_reported() -> None:
    assert misspelled_variables({"ATOLL_ISLAND": "1x1x4"}) == [
        "the environment variable ATOLL_ISLAND is the number of an island, for `atoll host`; did you mean "
        "ATOLL_ISLANDS?"
    ]
    assert misspelled_variables({"ATOLL_ISLAND": ""}) == []


def test_known_variables_and_those_of_others_are_not_reported() -> None:
    known = [each.variable for each in SETTINGS.values()] + [
        each.variable for table in TABLES for each in table.settings
    ]
    others = ["ATOLL_TEST_SEED", "ATOLL_SUSPEND_FOLDER", "ATOLL_MY_OWN", "JAX_PLATFORM", "PATH"]
    assert misspelled_variables(dict.fromkeys((*known, *others), "1")) == []
