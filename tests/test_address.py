"""Addresses of clusters: their forms, and why one cannot be reached."""

from __future__ import annotations

import pytest

from tests.clusters import free_port
from tuner.errors import ClusterError
from tuner.execution.address import check_reachable, check_version, is_outside, reason_of

MISMATCH = (
    "Version mismatch: The cluster was started with:\n    Ray: 2.59.0\n    Python: 3.12.1\n"
    "This process on node 10.0.0.2 was started with:\n    Ray: 2.60.0\n    Python: 3.11.9\n"
)


@pytest.mark.parametrize(
    ("address", "outside"),
    [
        (None, False),
        ("auto", False),
        ("10.0.0.1:6379", False),
        ("http://head:8265", True),
        ("https://head", True),
        ("ray://head:10001", True),
    ],
)
def test_the_form_of_an_address_says_where_the_study_is_driven(address: str | None, outside: bool) -> None:
    assert is_outside(address) is outside


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "http://127.0.0.1:{}", "ray://127.0.0.1:{}", "https://127.0.0.1:{}"])
def test_a_head_that_is_not_there_is_one_line(form: str) -> None:
    address = form.format(free_port())
    with pytest.raises(ClusterError, match=f"Ray at {address} cannot be reached: .*refused"):
        check_reachable(address)


@pytest.mark.parametrize("address", ["head", "6379", "ftp://head:1", "http://head:port", "head:99999", ""])
def test_what_is_no_address_is_said(address: str) -> None:
    with pytest.raises(ClusterError, match="is no address of a Ray cluster"):
        check_reachable(address)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (MISMATCH, "the cluster at A runs Ray 2.59.0 on Python 3.12.1, this process Ray 2.60.0 on Python 3.11.9"),
        (
            "Token authentication is enabled but no authentication token was found",
            "the cluster at A wants a token, and none was found",
        ),
        (
            "Authentication failed: Forbidden: Invalid authentication token\n\nToken authentication is enabled but the "
            "authentication token is invalid or incorrect.",
            "the cluster at A wants a token, and it is wrong",
        ),
        ("Ray couldn't find an authentication token. See", "the cluster at A wants a token, and none was found"),
        (
            "InvalidAuthToken: Authentication token is missing or incorrect",
            "the cluster at A wants a token, and it is missing or wrong",
        ),
        (
            "Initialization failure from server:\nTraceback:\n  x\nValueError: y",
            "Ray at A cannot be started or reached: ValueError: y",
        ),
        ("Could not read\nmore", "Ray at A cannot be started or reached: Could not read"),
    ],
)
def test_what_ray_says_becomes_one_line(said: str, expected: str) -> None:
    error = reason_of("A", RuntimeError(said))
    assert (error.message, error.exit_code) == (expected, 3)


def test_the_versions_of_ray_must_agree() -> None:
    check_version("A", "2.60.1")
    with pytest.raises(ClusterError, match=r"the cluster at A runs Ray 2\.59\.0, this machine 2\.60\."):
        check_version("A", "2.59.0")
