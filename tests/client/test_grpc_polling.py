"""Tests of the choice of gRPC's poller."""

from __future__ import annotations

import os

import pytest

from atoll.client.grpc_polling import VALUE, polled_by_callers
from atoll.cluster.environment_variables import GRPC_EXPERIMENTS

VARIABLE = GRPC_EXPERIMENTS.variable


def test_the_choice_is_in_the_environment_only_within_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with polled_by_callers():
        assert os.environ[VARIABLE] == VALUE
    assert VARIABLE not in os.environ


def test_the_choice_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "tcp_frame_size_tuning")
    with polled_by_callers():
        assert os.environ[VARIABLE] == "tcp_frame_size_tuning"
    assert os.environ[VARIABLE] == "tcp_frame_size_tuning"
