"""A report as a picture, for pages that cannot hold one: drawn by the Chromium or Chrome of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tuner.errors import InputError, TuneError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# The head of the page: figures, verdicts, the best trial, history and curves.
WIDTH, HEIGHT = 1000, 1300
TIMEOUT_S = 60.0
_FLAGS = ("--headless=new", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--hide-scrollbars")


def draw(page: Path, to: Path) -> None:
    """Draw the head of a page, as a light screen shows it.

    Args:
        page: An HTML file that needs no network.
        to: The PNG file.

    Raises:
        InputError: No browser is on the PATH.
        TuneError: The browser drew nothing.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        remedy = f"Install one (Debian: apt-get install chromium), or open the page itself: {page}"
        raise InputError("a picture needs Chromium or Chrome, and none is on the PATH", remedy)
    with tempfile.TemporaryDirectory(prefix="tune-browser-", ignore_cleanup_errors=True) as profile:
        draft = Path(profile, "picture.png")
        said = _run([browser, *_flags(profile), f"--screenshot={draft}", page.absolute().as_uri()])
        if not draft.exists():
            raise TuneError(f"{browser} drew nothing: {said}", f"Open the page itself: {page}")
        _put(draft, to)


def _flags(profile: str) -> list[str]:
    # As root, in a container say, Chromium has no sandbox; the page is ours and asks nobody.
    no_sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    size = f"--window-size={WIDTH},{HEIGHT}"
    return [*_FLAGS, *no_sandbox, f"--user-data-dir={profile}", size, "--virtual-time-budget=5000"]


def _run(arguments: list[str]) -> str:
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"nothing after {TIMEOUT_S:g} s"
    return next(reversed(done.stderr.strip().splitlines()), f"exit code {done.returncode}")


def _put(draft: Path, to: Path) -> None:
    try:
        shutil.copyfile(draft, to)
    except OSError as error:
        raise InputError(f"{to} cannot be written: {error.strerror}", "Choose another place: --png FILE") from error
