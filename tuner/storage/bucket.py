"""The files under one URL, through fsspec: whole files are read and written, and errors are one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from tuner.errors import StorageError
from tuner.storage.place import without_secrets

# What the file systems of fsspec are called, and the extra that installs them.
EXTRAS = {
    "s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure"
}  # fmt: skip
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5, 60

Method = TypeVar("Method", bound=Callable[..., Any])


class Seen(NamedTuple):
    """A file as a listing shows it: its size in bytes, and a tag that changes with its content."""

    size: int
    tag: str


def _told(method: Method) -> Method:
    """What a file system raises, as a StorageError; a file that is not there stays a FileNotFoundError."""

    @wraps(method)
    def call(bucket: Bucket, *args: Any) -> Any:
        try:
            return method(bucket, *args)
        except (StorageError, FileNotFoundError):
            raise
        except Exception as error:  # each provider's library raises its own kinds
            raise _error(bucket.url, error) from error

    return cast("Method", call)


class Bucket:
    """The files under a URL, by their names relative to it.

    Raises:
        StorageError: The URL cannot be used; so does every method but where a file is not there.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, self._root = _open(url)
        self._is_local = "file" in _protocols(self._fs)

    @_told
    def listing(self) -> dict[str, Seen]:
        """All files, by name."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(self._root, detail=True)
        except FileNotFoundError as error:
            raise _error(self.url, error) from error
        start = len(self._root.rstrip("/")) + 1
        files = {path[start:]: info for path, info in found.items() if info["type"] == "file"}
        # An object may have any name; none may lead out of the working copy.
        return {name: _seen(info) for name, info in files.items() if not {"", ".", ".."} & set(name.split("/"))}

    @_told
    def folders(self) -> list[str]:
        """The names of the folders right under it; none where there is nothing yet."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            self.listing()
            return []
        return sorted(info["name"].rstrip("/").rpartition("/")[2] for info in found if info["type"] == "directory")

    @_told
    def read(self, name: str) -> bytes:
        """A file's content."""
        return bytes(self._fs.cat_file(self._path(name)))

    @_told
    def exists(self, name: str) -> bool:
        """Whether a file is there now."""
        self._fs.invalidate_cache()
        return bool(self._fs.exists(self._path(name)))

    @_told
    def write(self, name: str, data: bytes) -> None:
        """Make or replace a file; a kill leaves the old or the new one."""
        self._replace(name, lambda path: self._fs.pipe_file(path, data))

    @_told
    def upload(self, file: Path, name: str) -> None:
        """As `write`, from a file of this machine."""
        try:
            self._replace(name, lambda path: self._fs.put_file(str(file), path))
        except StorageError:
            # Which of the two is not there.
            file.stat()
            raise

    @_told
    def create(self, name: str, data: bytes) -> bool:
        """Make a file that nobody else has made; whether it was made."""
        path = self._path(name)
        self._make_parent(path)
        try:
            self._fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        except FileNotFoundError as error:
            raise _error(self.url, error) from error
        return True

    @_told
    def download(self, name: str, file: Path) -> None:
        """A file to this machine, where it appears when it is whole."""
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f".{file.name}.{os.getpid()}.part")
        try:
            self._fs.get_file(self._path(name), str(draft))
            draft.replace(file)
        finally:
            draft.unlink(missing_ok=True)

    @_told
    def delete(self, name: str) -> None:
        """Remove a file; it need not be there."""
        try:
            self._fs.rm_file(self._path(name))
        except FileNotFoundError:
            return

    def _replace(self, name: str, write: Callable[[str], object]) -> None:
        path = self._path(name)
        self._make_parent(path)
        try:
            # An object appears when it is whole, a file as soon as it is begun.
            write(f"{path}.new" if self._is_local else path)
        except FileNotFoundError as error:
            raise _error(self.url, error) from error
        if self._is_local:
            os.replace(f"{path}.new", path)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_parent(self, path: str) -> None:
        # Object stores have no folders; to make one there would make a bucket, at a price.
        if self._is_local:
            os.makedirs(os.path.dirname(path), exist_ok=True)


def _open(url: str) -> tuple[Any, str]:
    scheme = url.partition(":")[0]
    try:
        from fsspec.core import url_to_fs

        fs, path = url_to_fs(url, use_listings_cache=False, **_options(scheme))
    except (ImportError, ValueError) as error:
        if scheme in EXTRAS:
            extra = EXTRAS[scheme]
            raise StorageError(
                f"--root {url}: {scheme}:// needs a package that is not installed", f"pip install 'tuner-llm[{extra}]'"
            ) from error
        raise StorageError(
            f"--root {url}: unknown kind of storage {scheme}://", f"Known: {', '.join(EXTRAS)}, and others of fsspec."
        ) from error
    except Exception as error:
        raise _error(url, error) from error
    return fs, str(path)


def _options(scheme: str) -> dict[str, Any]:
    if EXTRAS.get(scheme) != "s3":
        return {}
    # The defaults wait for minutes where nobody answers.
    limits = {"connect_timeout": CONNECT_TIMEOUT_S, "read_timeout": READ_TIMEOUT_S, "retries": {"max_attempts": 2}}
    return {"config_kwargs": limits}


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _seen(info: dict[str, Any]) -> Seen:
    keys = ("ETag", "etag", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified", "updated", "created")
    return Seen(int(info["size"]), f"{info['size']} {next((info[key] for key in keys if info.get(key)), '')}")


def _error(url: str, error: Exception) -> StorageError:
    kind = type(error).__name__
    lines = without_secrets(str(error)).strip().splitlines()
    reason = lines[0] if lines else kind
    if isinstance(error, FileNotFoundError):
        return StorageError(f"{url} cannot be used: {reason}", "Make the bucket first, or correct --root.")
    if isinstance(error, PermissionError) or "Credential" in kind or "Auth" in kind or "Token" in kind:
        return StorageError(
            f"{url} cannot be used: {reason}",
            "Give credentials as the provider's own tools take them: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "a profile or a role; and see that they may read and write there.",
        )
    return StorageError(
        f"{url} cannot be reached: {reason}", "See that the network is up and the endpoint right (AWS_ENDPOINT_URL)."
    )
