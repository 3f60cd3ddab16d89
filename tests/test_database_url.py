"""URLs of databases: which can hold a study, and what is shown of them."""

from __future__ import annotations

import pytest

from tuner.study_file.database_url import fault, without_password


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:////var/studies.db",
        "postgresql://host/name",
        "postgresql+psycopg2://user:secret@host:5432/name",
        "mysql+pymysql://user@host/name?charset=utf8",
    ],
)
def test_a_database_that_keeps_a_study_has_no_fault(url: str) -> None:
    assert fault(url) == ""


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("foo", "must be a database URL such as"),
        ("postgres://host/name", "did you mean postgresql?"),
        ("http://host/name", "'http' is no database that is known here"),
        ("sqlite://", "keeps nothing on disk"),
        ("sqlite:///:memory:", "keeps nothing on disk"),
        ("sqlite:///rel.db", "must name an absolute path"),
        ("postgresql://[", "is not a URL"),
    ],
)
def test_a_database_that_cannot_keep_a_study_is_refused_with_the_rule(url: str, message: str) -> None:
    assert message in fault(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://user:secret@host/name", "at postgresql://user:***@host/name"),
        ("postgresql://user:se@cret@host/name", "at postgresql://user:***@host/name"),
        ("postgresql://user@host/name", "at postgresql://user@host/name"),
        ("sqlite:////a/b.db", "at sqlite:////a/b.db"),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    assert without_password(f"at {url}", url) == shown


def test_a_text_without_a_database_is_left_as_it_is() -> None:
    assert without_password("user:secret@host", None) == "user:secret@host"
