"""A real S3-compatible server, and machines that share nothing but it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def s3_server(bucket: str = "bucket") -> Iterator[str]:
    """Its address; this process's environment names it and its credentials, and it has one bucket."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("AWS_ENDPOINT_URL", address)
            environment.setenv("AWS_ACCESS_KEY_ID", "testing")
            environment.setenv("AWS_SECRET_ACCESS_KEY", "verysecret")
            environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
            environment.setenv("AWS_EC2_METADATA_DISABLED", "true")
            _wait_for(address, process)
            urllib.request.urlopen(urllib.request.Request(f"{address}/{bucket}", method="PUT")).close()
            yield address
    finally:
        process.kill()
        process.wait()


def _wait_for(address: str, process: subprocess.Popen[bytes], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            urllib.request.urlopen(f"{address}/moto-api/").close()
            return
        except (urllib.error.URLError, ConnectionError):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
