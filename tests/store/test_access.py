"""The URLs of one server, of a master behind Sentinels and of a cluster: what is read, and what is refused."""

from __future__ import annotations

from typing import Any, cast

import pytest
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.sentinel import SentinelConnectionPool

from control.store.access import SCHEMES, Access, ClusterAccess, example_key, open_access
from control.store.cluster import SlotLink, SpreadLink, slot_of
from control.store.keys import PartitionKeys
from control.store.link import Link


def settings_of(access: Access) -> dict[str, Any]:
    return cast("dict[str, Any]", access.pool.connection_kwargs)


def first_nodes(access: Access) -> list[tuple[str, int]]:
    """The nodes that a cluster is first asked at."""
    assert isinstance(access, ClusterAccess)
    return access._slots._first


def sentinels(access: Access) -> list[dict[str, Any]]:
    assert isinstance(access.pool, SentinelConnectionPool)
    return [each.connection_pool.connection_kwargs for each in access.pool.sentinel_manager.sentinels]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_that_is_offered_can_be_opened(scheme: str) -> None:
    rest = "/run/redis.sock" if scheme == "unix" else "h:1/service" if scheme.endswith("+sentinel") else "h:1"
    access = open_access(f"{scheme}://{rest}", timeout_s=3.0, name="ear-1")
    assert access.is_cluster == scheme.endswith("+cluster")
    found = settings_of(access)
    assert (found["socket_timeout"], found["socket_connect_timeout"], found["client_name"]) == (3.0, 3.0, "ear-1")
    kind = {"rediss": SSLConnection, "unix": UnixDomainSocketConnection}.get(scheme.partition("+")[0], Connection)
    assert issubclass(access.pool.connection_class, kind)
    assert issubclass(access.pool.connection_class, SSLConnection) == scheme.startswith("rediss")


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        ("a:7000", [("a", 7000)]),
        ("a:7000,b:7001,c:7002", [("a", 7000), ("b", 7001), ("c", 7002)]),
        ("a,b:7001", [("a", 6379), ("b", 7001)]),
        ("me:p%40ss@a:7000,b", [("a", 7000), ("b", 6379)]),
        ("[::1]:7000,10.0.0.1", [("::1", 7000), ("10.0.0.1", 6379)]),
        ("a:7000/", [("a", 7000)]),
        ("a:7000/0", [("a", 7000)]),
        ("a:7000/?health_check_interval=3", [("a", 7000)]),
    ],
)
def test_a_cluster_is_named_by_any_of_its_nodes(hosts: str, found: list[tuple[str, int]]) -> None:
    assert first_nodes(open_access(f"redis+cluster://{hosts}")) == found


def test_the_credentials_and_options_hold_for_all_nodes_and_for_the_client() -> None:
    access = open_access("rediss+cluster://me:p%40ss@a:1,b:2?ssl_ca_certs=/ca.pem&health_check_interval=3")
    found, client = settings_of(access), cast("Any", access.redis).connection_kwargs
    for settings in (found, client):
        assert (settings["username"], settings["password"], settings["ssl_ca_certs"]) == ("me", "p@ss", "/ca.pem")
        assert settings["health_check_interval"] == 3
    assert client["connection_class"] is SSLConnection


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis+cluster://h:1/3", "no databases"),
        ("rediss+cluster://h:1/service", "no databases"),
        ("redis+cluster://", "names no host"),
        ("redis+cluster://a:1,,b:2", "names no host"),
        ("redis+cluster://:7000", "names no host"),
        ("redis+cluster://h:many", "ort could not be cast"),
        ("redis+cluster://h:1,g:70000", "ort out of range"),
        ("redis+sentinel://h:26379", "names no service"),
        ("redis+sentinel://h:26379/", "names no service"),
        ("redis+sentinel:///service", "names no host"),
        ("redis+sentinel://h:x/service", "ort could not be cast"),
        ("redis+cluster://h:1?socket_timeout=soon", "socket_timeout"),
        ("http://h:1", "must specify one of"),
        ("redis+other://h:1", "must specify one of"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_with_what_is_wrong(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        open_access(url)


def test_sentinels_are_asked_for_the_service_and_its_database_is_the_masters() -> None:
    access = open_access("redis+sentinel://me:hush@a,b:7/calls/2?health_check_interval=3", timeout_s=4.0)
    assert isinstance(access.pool, SentinelConnectionPool)
    assert (access.pool.service_name, access.pool.is_master) == ("calls", True)
    assert [(each["host"], each["port"]) for each in sentinels(access)] == [("a", 26379), ("b", 7)]
    found = settings_of(access)
    assert (found["username"], found["password"], found["db"], found["health_check_interval"]) == ("me", "hush", 2, 3)
    assert {each["socket_timeout"] for each in sentinels(access)} == {4.0}
    assert not any(each.get("password") for each in sentinels(access)), "the master's password isn't for them"


def test_sentinels_have_a_password_of_their_own_and_the_same_certificates() -> None:
    url = "rediss+sentinel://a:1/calls?sentinel_username=who&sentinel_password=p%40ss&ssl_ca_certs=/ca.pem"
    access = open_access(url)
    (about,) = sentinels(access)
    assert (about["username"], about["password"], about["ssl_ca_certs"]) == ("who", "p@ss", "/ca.pem")
    assert settings_of(access)["ssl_ca_certs"] == "/ca.pem"
    assert settings_of(access).get("password") is None


async def test_one_read_covers_all_partitions_of_one_server_and_one_of_a_cluster() -> None:
    one, many = open_access("redis://h:1"), open_access("redis+cluster://h:1")
    assert one.groups(3) == [(0, 1, 2)]
    assert many.groups(3) == [(0,), (1,), (2,)]
    for access in (one, many):
        assert sorted(number for group in access.groups(16) for number in group) == list(range(16))
    assert isinstance(many.link("x"), SlotLink)
    assert isinstance(many.spread(), SpreadLink)
    assert {type(one.link("x")), type(one.spread())} == {Link}


def test_a_groups_example_is_in_the_slot_of_all_its_keys() -> None:
    for number in range(16):
        known = PartitionKeys(number)
        names = [known.commands, known.acks, known.events("caller"), known.submissions("ear-1"), known.aborts("ear-1")]
        assert {slot_of(name) for name in names} == {slot_of(example_key((number,)))}
