"""The form with which an operator changes a tenant."""

from __future__ import annotations

import pytest

from atoll.protocol.messages import SetTenant
from atoll.web.tenant_values import TenantValues

BEFORE = TenantValues(1.0, 0, 1 << 30)


def test_only_what_differs_is_changed() -> None:
    assert BEFORE.change("ana", TenantValues(3.0, 0, 1 << 30)) == SetTenant("ana", share=3.0)
    assert BEFORE.change("ana", TenantValues(1.0, 2, 0)) == SetTenant("ana", priority=2, limits={"memory": 0})


def test_a_form_has_an_amount_with_a_unit() -> None:
    assert TenantValues.parse(2.0, 1.0, "8GiB") == TenantValues(2.0, 1, 8 << 30)


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ((None, 0.0, "0B"), "need a number"),
        ((1.0, None, "0B"), "need a number"),
        ((1.0, 0.0, None), "is not an amount"),
    ],
)
def test_a_form_with_a_missing_or_invalid_field_is_refused(
    form: tuple[float | None, float | None, str | None], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        TenantValues.parse(*form)
