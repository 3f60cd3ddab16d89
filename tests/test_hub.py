"""Models the hub does not give out, in one line; downloads from it. A local server answers as the hub does."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Tune

ENTITLED, KNOWN = "Bearer entitled", "Bearer known"


class Hub(BaseHTTPRequestHandler):
    """`open/*` is for all, `meta-llama/*` for those who accepted its terms; there is nothing else."""

    def do_HEAD(self) -> None:
        repository, _, file = self.path.strip("/").partition("/resolve/main/")
        token, headers = self.headers.get("Authorization"), {"Content-Length": "0"}
        status = 200
        if token not in {None, ENTITLED, KNOWN}:
            status, headers["X-Error-Message"] = 401, "Invalid credentials in Authorization header"
        elif repository.startswith("meta-llama/") and token != ENTITLED:
            status, headers["X-Error-Code"] = 403 if token else 401, "GatedRepo"
            headers["X-Error-Message"] = f"Access to model {repository} is restricted."
        elif not repository.startswith(("open/", "meta-llama/")):
            status, headers["X-Error-Code"] = 404 if token else 401, "RepoNotFound"
            headers["X-Error-Message"] = "Repository not found" if token else "Invalid username or password."
        elif file != "config.json":
            status, headers["X-Error-Code"] = 404, "EntryNotFound"
        self.send_response(status)
        for name, value in (headers | {"X-Repo-Commit": "0" * 40, "ETag": '"0"'}).items():
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self) -> None:
        """Whose token it is."""
        name = {ENTITLED: "entitled", KNOWN: "known"}.get(self.headers.get("Authorization", ""))
        answer = json.dumps({"name": name} if name else {"error": "Invalid username or password."}).encode()
        self.send_response(200 if name else 401)
        self.send_header("Content-Length", str(len(answer)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Files(BaseHTTPRequestHandler):
    """Every model is the one in `folder`."""

    folder = Path()

    def do_HEAD(self) -> None:
        path = self.folder / self.path.partition("/resolve/main/")[2]
        data = path.read_bytes() if path.is_file() else b""
        self.send_response(200 if path.is_file() else 404)
        etag = hashlib.sha1(data).hexdigest()
        headers = {"X-Repo-Commit": "0" * 40, "ETag": f'"{etag}"', "Content-Length": str(len(data))}
        for name, value in (headers | ({} if path.is_file() else {"X-Error-Code": "EntryNotFound"})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_GET = do_HEAD

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with serving(Hub) as url:
        yield url


def environment(hub: str, folder: Path, token: str) -> dict[str, str]:
    # Without a token of whoever runs the tests.
    return {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder), "HF_TOKEN": token}


ASK = """
import json, sys
from trainables.hub import access_fault
print(json.dumps([access_fault(name) for name in sys.argv[1:]]))
"""


LOAD = """
from pathlib import Path
from tests.tiny import CPU, tiny_config
from trainables import progress
from trainables.model import build_model
from trainables.tokenizer import load_tokenizer
progress.EVERY_S = 0.0
config = tiny_config(Path("none.jsonl"), model="open/model", tokenizer="byte-level")
with progress.heard_by(print):
    build_model(config, load_tokenizer(config), CPU.device)
"""


def said_by(script: str, arguments: list[str], variables: dict[str, str]) -> str:
    """What a fresh process, which reads its environment, prints."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def faults_of(names: list[str], variables: dict[str, str]) -> list[str]:
    """What is said of models."""
    faults: list[str] = json.loads(said_by(ASK, names, variables))
    return faults


NAMES = ["open/model", "meta-llama/Llama-3.1-8B", "no/such-model", "not/a/name", "."]


@pytest.mark.parametrize(
    ("token", "faults"),
    [
        (
            "",
            [
                "",
                "model meta-llama/Llama-3.1-8B is gated: accept its terms at HUB/meta-llama/Llama-3.1-8B and set "
                "HF_TOKEN in the environment",
                "model no/such-model: there is none at HUB/no/such-model, or it is private; check the name, or set "
                "HF_TOKEN in the environment",
                "model not/a/name: no such folder, and not the name of a model on the hub; check it",
                "",
            ],
        ),
        (
            "known",
            [
                "",
                "model meta-llama/Llama-3.1-8B is gated, and the token in HF_TOKEN has no access to it; ask for access "
                "at HUB/meta-llama/Llama-3.1-8B",
                "model no/such-model: there is none at HUB/no/such-model, or it is private; check the name",
                "model not/a/name: no such folder, and not the name of a model on the hub; check it",
                "",
            ],
        ),
        ("entitled", ["", "", None, None, ""]),
        ("stale", ["model open/model: HUB/open/model does not accept the token in HF_TOKEN; make a new one"]),
    ],
)
def test_what_the_hub_refuses_is_said_in_a_line(hub: str, tmp_path: Path, token: str, faults: list[str | None]) -> None:
    found = faults_of(NAMES, environment(hub, tmp_path, token))
    for fault, expected in zip(found, faults, strict=False):
        assert expected is None or fault == expected.replace("HUB", hub)


def test_a_gated_model_without_a_token_ends_the_command_before_anything_starts(
    hub: str, tmp_path: Path, tune: Tune
) -> None:
    file = REPOSITORY / "search_spaces" / "llama_fsdp.yaml"
    done = tune("run", file, **environment(hub, tmp_path, ""))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"model meta-llama/Llama-3.1-8B is gated: accept its terms at {hub}/meta-llama/Llama-3.1-8B and set HF_TOKEN "
        "in the environment"
    ]
    assert not (tmp_path / "studies").exists()


def test_a_hub_that_cannot_be_asked_refuses_nothing(tmp_path: Path) -> None:
    # Nothing listens on the port that is kept for discarding.
    assert faults_of(["meta-llama/Llama-3.1-8B"], environment("http://127.0.0.1:9", tmp_path, "")) == [""]


@pytest.mark.slow
def test_a_download_tells_its_file_rate_and_time_left(tmp_path: Path) -> None:
    from tests.tiny import CPU, MODEL, tiny_config
    from trainables.model import build_model
    from trainables.tokenizer import load_tokenizer

    config = tiny_config(tmp_path / "none.jsonl", model=MODEL)
    made = build_model(config, load_tokenizer(config), CPU.device)
    made.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    with serving(type("Served", (Files,), {"folder": tmp_path / "model"})) as url:
        told = said_by(LOAD, [], environment(url, tmp_path / "cache", "")).splitlines()
    assert told[:2] == ["loads open/model", "downloads model.safetensors"]
    assert re.fullmatch(r"downloads model.safetensors: 100%, \d+\.\d MB/s, about 0 s left", told[2])
    assert told[-1].startswith("loading weights: 100%")
