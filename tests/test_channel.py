"""What a slot and its workers say to each other, and who else calls."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tuner.execution.channel import Endpoint, Quit, connect


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    opened = Endpoint("127.0.0.1")
    yield opened
    opened.close()


@pytest.mark.parametrize("said", [None, b"", b"GET / HTTP/1.1\r\n\r\n"], ids=["silent", "hangs up", "http"])
def test_a_stranger_does_not_keep_a_worker_out(endpoint: Endpoint, said: bytes | None) -> None:
    with socket.create_connection((endpoint.address.host, endpoint.address.port)) as stranger:
        if said is not None:
            stranger.sendall(said)
            stranger.close()
        worker = connect(endpoint.address)
        worker.send(Quit())
        assert endpoint.receive(10) == Quit()
