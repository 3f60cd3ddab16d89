"""A study that is given to a cluster, as the job that runs it remembers it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.storage.place import shown, url_of

if TYPE_CHECKING:
    from ray.job_submission import JobDetails


@dataclass(frozen=True)
class Submission:
    """A study that was given to a cluster.

    Attributes:
        study: Its name.
        root: Where its studies live there.
        env: Names of the variables that go along.
        secrets: Names of those that nobody may see.
        key: What makes a repeated submission the same one; empty: nothing does.
    """

    study: str
    root: str
    env: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    key: str = ""

    def to_metadata(self) -> dict[str, str]:
        """As Ray keeps it with a job; names only."""
        return {"tune": json.dumps(asdict(self))}

    @classmethod
    def of(cls, job: JobDetails) -> Submission | None:
        """What a job was submitted as; None for one that is no study."""
        kept = json.loads((job.metadata or {}).get("tune", "null")) if job.submission_id else None
        return kept and cls(**kept | {name: tuple(kept[name]) for name in ("env", "secrets")})


def root_there(root: Path) -> str:
    """A studies' root on the cluster: a relative one counts from the home folder there."""
    return shown(root) if root.is_absolute() or url_of(root) else f"~/{root}"
