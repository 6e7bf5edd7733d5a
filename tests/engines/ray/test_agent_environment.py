"""What the engine and host agents get of the environment of who starts a cluster on Ray."""

from __future__ import annotations

from atoll.engines.ray.agent_environment import agent_environment, engine_environment

SETTINGS = {"ATOLL_CACHE_DIR": "off", "XLA_FLAGS": "--xla", "OMP_NUM_THREADS": "4"}
SAID = SETTINGS | {
    "ATOLL_TOKEN": "of clients",
    "ATOLL_HOST_TOKEN": "of hosts",
    "ATOLL_AUTHORITY": "key",
    "ATOLL_JOIN": "join",
    "ATOLL_INSECURE": "1",
    "ATOLL_ADDRESS": "there",
    "ATOLL_RAY_ADDRESS": "auto",
    "HOME": "/home",
    "JAX_PLATFORMS": "atoll",
}


def test_hosts_get_what_is_for_all_of_the_cluster_and_of_its_secrets_what_they_join_by() -> None:
    assert agent_environment(True, SAID) == SETTINGS | {"ATOLL_JOIN": "join"}


def test_without_tls_hosts_get_the_tokens() -> None:
    tokens = {"ATOLL_TOKEN": "of clients", "ATOLL_HOST_TOKEN": "of hosts"}
    assert agent_environment(False, SAID) == SETTINGS | tokens


def test_the_engine_gets_what_its_cluster_is_made_with_and_no_join_string_of_another() -> None:
    made_with = {"ATOLL_TOKEN": "of clients", "ATOLL_HOST_TOKEN": "of hosts", "ATOLL_AUTHORITY": "key"}
    assert engine_environment(SAID) == SETTINGS | made_with
