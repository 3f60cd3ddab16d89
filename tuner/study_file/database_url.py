"""The URL of a database, as SQLAlchemy takes it, looked at without SQLAlchemy."""

from __future__ import annotations

from pathlib import PurePath
from urllib.parse import unquote, urlsplit

from tuner.study_file.wording import did_you_mean

DIALECTS = ("sqlite", "postgresql", "mysql", "mariadb", "oracle", "mssql")
EXAMPLES = "postgresql://HOST/NAME or sqlite:////ABSOLUTE/PATH.db"


def fault(url: str) -> str:
    """Why the record of a study cannot be kept there; nothing when it may."""
    scheme, separator, place = url.partition("://")
    if not separator:
        return f"must be a database URL such as {EXAMPLES}, got {url!r}"
    dialect = scheme.split("+")[0]
    if dialect not in DIALECTS:
        return f"{dialect!r} is no database that is known here{did_you_mean(dialect, DIALECTS)}; use {EXAMPLES}"
    try:
        urlsplit(url)
    except ValueError as error:
        return f"is not a URL: {error}; use {EXAMPLES}"
    path = unquote(place.removeprefix("/").split("?")[0])
    if dialect != "sqlite":
        return ""
    if path in ("", ":memory:"):
        return f"{url} keeps nothing on disk: a study could not be resumed; use sqlite:////ABSOLUTE/PATH.db"
    if not PurePath(path).is_absolute():
        return f"must name an absolute path, as a study is read from anywhere, got {path!r}; use sqlite:////DIR/{path}"
    return ""


def without_password(text: str, url: str | None) -> str:
    """A text in which the URL may stand, with `***` for the URL's password."""
    if url is None or "://" not in url:
        return text
    credentials, at, _ = url.partition("://")[2].split("/")[0].rpartition("@")
    user, colon, password = credentials.partition(":")
    return text.replace(f"{user}:{password}@", f"{user}:***@") if at and colon and password else text
