"""Where a study's files lie for a process on a node of a cluster: in the driver's folder, or in one of the node's own.

A study whose root is a URL runs on nodes that share nothing but the URL: who does not see the driver's working copy
has a folder in the cache of its node instead.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tuner.storage.place import as_root, url_of


@dataclass(frozen=True)
class Home:
    """A study's folder as its driver knows it.

    Attributes:
        folder: Its path where the driver runs.
        url: Its URL; empty where its root is a folder, which every node sees.
        mark: A file in the folder that the driver has made for this sitting: who sees it sees the folder.
    """

    folder: str
    url: str = ""
    mark: str = ""

    @property
    def is_seen(self) -> bool:
        """Whether this process sees it."""
        return not self.url or Path(self.folder, self.mark).exists()

    @property
    def here(self) -> Path:
        """The folder, or this node's own for the same study, which is made."""
        return Path(self.folder) if self.is_seen else as_root(self.url)


@contextmanager
def marked(study_dir: Path) -> Iterator[Home]:
    """A study's home, to be known from every node while the block runs."""
    folder, url = study_dir.resolve(), url_of(study_dir)
    if url is None:
        yield Home(str(folder))
        return
    mark = folder / "ray" / f"seen-{uuid.uuid4().hex}"
    mark.parent.mkdir(exist_ok=True)
    mark.touch()
    try:
        yield Home(str(folder), url, mark.relative_to(folder).as_posix())
    finally:
        mark.unlink(missing_ok=True)
