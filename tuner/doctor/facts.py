"""What a host says of itself. Each node of a cluster is asked; what that means is said in checks.py.

Imports neither Ray nor torch: it runs in a task on every node, whatever is installed there.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from tuner.doctor.meeting_place import meeting_object
from tuner.errors import TuneError
from tuner.storage.place import as_root
from tuner.study_file.variables import receive
from tuner.tracking.values import VERSIONS, version

HUB_TIMEOUT_S = 10.0
OTHER_STORE = "{url} is another one there\nSee that each node has the same endpoint (AWS_ENDPOINT_URL)."
SMI = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")


@dataclass(frozen=True)
class Room:
    """Of a file system."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Asked:
    """What a host is to look at.

    Attributes:
        folder: Folder in the studies' root with a file `driver`, and room for one of each node.
        secret: What that file holds.
        mlflow_uri: Of the server that runs are sent to; empty where it is a file.
        models: What the study takes from the hub.
        url: Of the root, where it is one: a host that does not see the folder may use that instead.
        secrets_key: Where the cluster keeps the study's secrets; empty when there are none.
    """

    folder: str
    secret: str
    mlflow_uri: str = ""
    models: tuple[str, ...] = ()
    url: str = ""
    secrets_key: str = ""


@dataclass(frozen=True)
class HostFacts:
    """What it answers.

    Attributes:
        name: Of the node, as people know it.
        now_s: Its clock when it was asked.
        versions: Of Python and of the libraries that a study needs.
        gpus: Names of those that the driver knows.
        driver: Version of that driver.
        ray_gpus: Number of those that Ray hands out; set by whoever asks.
        storage_fault: Why the studies' root cannot be used from here.
        room: By place.
        mlflow_fault: Why the server cannot be reached from here.
        hub: What the hub makes of the token: a user's name, or nothing without a token.
        hub_fault: Why the hub refuses the token or a model.
        hub_unreachable: Why it cannot be asked.
        asked_s: The asker's clock before and after, set by it; what lies between is the error of `now_s`.
    """

    name: str
    now_s: float = 0.0
    versions: dict[str, str | None] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    driver: str = ""
    ray_gpus: float = 0.0
    storage_fault: str = ""
    room: dict[str, Room] = field(default_factory=dict)
    mlflow_fault: str = ""
    hub: str = ""
    hub_fault: str = ""
    hub_unreachable: str = ""
    asked_s: tuple[float, float] = (0.0, 0.0)


def host_facts(name: str, asked: Asked) -> HostFacts:
    """Look at this host."""
    gpus, driver = _gpus()
    hub, hub_fault, hub_unreachable = _hub(asked.models)
    return HostFacts(
        name=name,
        versions={"python": platform.python_version(), **{library: version(library) for library in VERSIONS}},
        gpus=gpus,
        driver=driver,
        storage_fault=storage_fault(name, asked),
        room=rooms(Path(asked.folder)),
        mlflow_fault=mlflow_fault(asked.mlflow_uri),
        hub=hub,
        hub_fault=hub_fault,
        hub_unreachable=hub_unreachable,
        now_s=time.time(),
    )


def clock() -> float:
    """This host's clock; asked apart, when all else has been loaded."""
    return time.time()


def rooms(root: Path) -> dict[str, Room]:
    """Of the studies' root, of the place for temporary files, and of shared memory."""
    while not root.exists() and root != root.parent:
        root = root.parent
    places = {"studies": root, "temporary files": Path(tempfile.gettempdir()), "shared memory": Path("/dev/shm")}
    found = {}
    for name, path in places.items():
        if path.is_dir():
            usage = shutil.disk_usage(path)
            found[f"{name} ({path})"] = Room(usage.free, usage.total)
    return found


def _gpus() -> tuple[tuple[str, ...], str]:
    try:
        done = subprocess.run(SMI, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return (), ""
    rows = [line.rpartition(",") for line in done.stdout.splitlines() if "," in line] if done.returncode == 0 else []
    return tuple(name.strip() for name, _, _ in rows), rows[0][2].strip() if rows else ""


def storage_fault(name: str, asked: Asked) -> str:
    """Why this host cannot use the studies' root, the remedy in a second line if any; empty where it can."""
    fault = _folder_fault(name, asked)
    if not fault or not asked.url:
        return fault
    receive(asked.secrets_key)
    return url_fault(asked.url, meeting_object(asked.secret), asked.secret)


def _folder_fault(name: str, asked: Asked) -> str:
    folder = Path(asked.folder)
    try:
        if (folder / "driver").read_text(encoding="utf-8") != asked.secret:
            return "it holds other files there"
        (folder / name).write_text(asked.secret, encoding="utf-8")
    except FileNotFoundError:
        return "it does not see it"
    except OSError as error:
        return f"it cannot write there: {error.strerror}"
    return ""


def url_fault(url: str, name: str, text: str) -> str:
    """Why this host cannot use a URL, where an object of this name holds this text; the remedy in a second line."""
    from tuner.storage.bucket import Bucket

    try:
        as_root(url)
        bucket, own = Bucket(url), meeting_object(uuid.uuid4().hex)
        if bucket.read(name) != text.encode():
            return OTHER_STORE.format(url=url)
        bucket.write(own, b"")
        bucket.delete(own)
    except FileNotFoundError:
        return OTHER_STORE.format(url=url)
    except TuneError as error:
        return str(error)
    return ""


def study_fault(folder: str, name: str, text: str, url: str, secrets_key: str) -> str:
    """Why this host cannot use a study that has a file of this name and text; empty where it sees it or its URL."""
    if reads(str(Path(folder, name)), text):
        return ""
    if not url:
        return f"it does not see {folder}"
    receive(secrets_key)
    return url_fault(url, name, text)


def reads(path: str, text: str) -> bool:
    """Whether a file is here, and holds this text."""
    try:
        return Path(path).read_text(encoding="utf-8") == text
    except OSError:
        return False


def mlflow_fault(uri: str) -> str:
    """Why a server cannot be reached from here; empty where it answers, whatever it says."""
    if not uri.startswith(("http://", "https://")):
        return ""
    import http.client
    import urllib.error
    import urllib.request

    try:
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return ""
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(getattr(error, "reason", error))
    return ""


def _hub(models: tuple[str, ...]) -> tuple[str, str, str]:
    """(whose token it is, why the hub refuses, why it cannot be asked)."""
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in {"1", "ON", "YES", "TRUE"}:
        return "", "", "HF_HUB_OFFLINE is set"
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    from trainables.hub import access_fault

    user = ""
    if token := get_token():
        try:
            user = str(HfApi().whoami(token=token).get("name", "a user"))
        except HfHubHTTPError as error:
            status = error.response.status_code
            return "", f"it does not accept the token in HF_TOKEN (HTTP {status})" if status in (401, 403) else "", ""
        except Exception as error:  # no network, a proxy, a server that is down
            return "", "", type(error).__name__
    return user, next(filter(None, map(access_fault, models)), ""), ""
