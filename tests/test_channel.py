"""What a slot and its workers say to each other, and who else calls."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest

from tuner.execution.channel import Endpoint, Go, Preparing, Quit, Wire, connect


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


@pytest.mark.parametrize("said", [["short"] * 3, ["long" * 5000]], ids=["three in a row", "20 kB"])
def test_an_answer_takes_no_longer_for_all_that_was_said_before(endpoint: Endpoint, said: list[str]) -> None:
    worker = connect(endpoint.address)

    def answer() -> None:
        while not isinstance(message := endpoint.receive(10), Quit):
            if message == said[-1]:
                endpoint.send(Go(0))

    slot = threading.Thread(target=answer)
    slot.start()
    took_s = [round_trip(worker, [Preparing(0, text) for text in said[:-1]] + said[-1:]) for _ in range(20)]
    worker.send(Quit())
    slot.join()
    assert median(took_s) < 0.02


def round_trip(worker: Wire, messages: list[Any]) -> float:
    began = time.perf_counter()
    for message in messages:
        worker.send(message)
    assert worker.recv() == Go(0)
    return time.perf_counter() - began
