"""A headless Chromium through chromedriver's own protocol: what it draws, logs and asks the network for."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage",
    "--no-first-run", "--disable-component-update",
)  # fmt: skip


def is_there() -> bool:
    """Whether this machine has Chromium and its driver."""
    return bool(shutil.which("chromedriver") and (shutil.which("chromium") or shutil.which("chromium-browser")))


class Browser:
    """One tab."""

    def __init__(self, url: str, session: str) -> None:
        self._url = f"{url}/session/{session}"

    def open(self, page: Path, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Show a file at a width, in a colour scheme."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.cdp("Emulation.setDeviceMetricsOverride", **metrics)
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._post("url", url=page.absolute().as_uri())

    def run(self, script: str) -> Any:
        """What a script returns."""
        return self._post("execute/sync", script=script, args=[])

    def wait_for(self, script: str) -> Any:
        """What an asynchronous script hands to `done`."""
        return self._post("execute/async", script=f"const done = arguments[0]; {script}", args=[])

    def logs(self, kind: str) -> list[dict[str, Any]]:
        """New entries of the log `browser` (the console) or `performance` (the network's events)."""
        entries: list[dict[str, Any]] = self._post("se/log", type=kind)
        return entries

    def requests(self) -> list[str]:
        """Addresses that were asked for since this was last called."""
        messages = [json.loads(entry["message"])["message"] for entry in self.logs("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def screenshot(self, to: Path) -> None:
        """The whole page as PNG."""
        height = self.run("return document.documentElement.scrollHeight")
        width = self.run("return innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.cdp("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        to.write_bytes(base64.b64decode(shot["data"]))

    def cdp(self, command: str, **parameters: Any) -> Any:
        """A command of Chromium's own protocol."""
        return self._post("goog/cdp/execute", cmd=command, params=parameters)

    def _post(self, path: str, **data: Any) -> Any:
        return _call(f"{self._url}/{path}", data)


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a fresh profile, which is gone afterwards."""
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    port = next(line.split("port ")[-1].strip(" .\n") for line in driver.stdout if "successfully on port" in line)
    url = f"http://127.0.0.1:{port}"
    options = {"args": [*FLAGS, f"--user-data-dir={profile}"]}
    wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
    try:
        session = _call(f"{url}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        try:
            yield Browser(url, session)
        finally:
            urllib.request.urlopen(urllib.request.Request(f"{url}/session/{session}", method="DELETE"), timeout=30)
    finally:
        driver.terminate()
        driver.wait(timeout=30)


def _call(url: str, data: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(data).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["value"]
