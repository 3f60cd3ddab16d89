"""Addresses of clusters: which form one has, and why a cluster cannot be reached, in one line."""

from __future__ import annotations

import re
import socket
import urllib.parse
from importlib import metadata

from tuner.errors import ClusterError

REACH_TIMEOUT_S = 10.0
_OUTSIDE = ("http", "https", "ray")
_PORTS = {"http": 80, "https": 443, "ray": 10001}
# What Ray says of tokens, the first that fits.
_TOKEN_FAULTS = {
    "missing or incorrect": "it is missing or wrong",
    "(no|find an|missing) authentication token": "none was found",
    "": "it is wrong",
}


def is_outside(address: str | None) -> bool:
    """Whether an address is that of a cluster this machine is no part of: a study runs there as a job."""
    return address is not None and address.partition("://")[0] in _OUTSIDE and "://" in address


def check_reachable(address: str) -> None:
    """Whether somebody listens there; Ray itself would try for minutes.

    Raises:
        ClusterError: Nobody does, or it is no address.
    """
    if address == "auto":
        return
    parts = urllib.parse.urlsplit(address if "://" in address else f"//{address}")
    try:
        place = (parts.hostname, parts.port or _PORTS.get(parts.scheme))
    except ValueError:
        place = (None, None)
    if not place[0] or not place[1] or parts.scheme not in {"", *_OUTSIDE}:
        forms = "auto, HOST:PORT, ray://HOST:PORT or http://HOST:PORT"
        raise ClusterError(f"{address} is no address of a Ray cluster", f"Write {forms}.")
    try:
        socket.create_connection((place[0], place[1]), REACH_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterError(
            f"Ray at {address} cannot be reached: {error}",
            "See on its head node that it runs (`ray status`), and which address that prints.",
        ) from None


def check_version(address: str, theirs: str) -> None:
    """Whether a cluster's Ray is the one this project is written for: the same minor version as here.

    Raises:
        ClusterError: It is another one.
    """
    ours = metadata.version("ray")
    if theirs.split(".")[:2] != ours.split(".")[:2]:
        raise ClusterError(
            f"the cluster at {address} runs Ray {theirs or 'of an unknown version'}, this machine {ours}",
            f"Install the same on both: pip install 'ray[default,train,tune]=={ours}'",
        )


def reason_of(address: str, error: Exception) -> ClusterError:
    """The error of Ray's that kept us from a cluster, as one line and what to do."""
    text = str(error)
    if found := _versions(text):
        return ClusterError(
            f"the cluster at {address} runs {found[0]}, this process {found[1]}", "Take the same on both."
        )
    if re.search("token|unauthenticated|unauthorized", text, re.IGNORECASE):
        said = next(words for pattern, words in _TOKEN_FAULTS.items() if re.search(pattern, text, re.IGNORECASE))
        return ClusterError(
            f"the cluster at {address} wants a token, and {said}",
            "Copy ~/.ray/auth_token from its head node (`ray get-auth-token` prints it), and set RAY_AUTH_MODE=token.",
        )
    lines = text.strip().splitlines() or [type(error).__name__]
    # A heading says nothing; what went wrong is at the end of what it heads.
    reason = lines[-1] if lines[0].endswith(":") else lines[0]
    return ClusterError(f"Ray at {address} cannot be started or reached: {reason}")


def _versions(text: str) -> tuple[str, str] | None:
    """(theirs, ours) in Ray's message about a mismatch."""
    found = re.findall(r"Ray: (\S+)\s+Python: (\S+)", text)
    if "mismatch" not in text.lower() or len(found) != 2:
        return None
    theirs, ours = (f"Ray {ray} on Python {python}" for ray, python in found)
    return theirs, ours
