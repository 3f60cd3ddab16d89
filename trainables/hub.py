"""Whether the hub lets us have a model: asked before anything starts, answered in one line. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_BUILT_IN = "byte-level"


def check_access(names: Iterable[Any]) -> None:
    """See that the hub gives out models and tokenizers.

    Args:
        names: As in a config; what is no name is left out.

    Raises:
        ValueError: It does not; nothing is checked where the hub cannot be reached.
    """
    for name in dict.fromkeys(name for name in names if isinstance(name, str) and name != _BUILT_IN):
        if fault := access_fault(name):
            raise ValueError(fault)


def access_fault(name: str) -> str:
    """Why the hub would refuse a model.

    Args:
        name: A hub id or a local folder. The token is the one in HF_TOKEN.

    Returns:
        What is wrong and what to do, in one line. Empty where nothing is, and where the hub cannot be asked: what is
        needed may be on this machine.
    """
    if Path(name).is_dir() or os.environ.get("HF_HUB_OFFLINE", "0").upper() in {"1", "ON", "YES", "TRUE"}:
        return ""
    from huggingface_hub import constants, get_hf_file_metadata, get_token, hf_hub_url
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    page, has_token = f"{constants.ENDPOINT}/{name}", get_token() is not None
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except HFValidationError:
        return f"model {name}: no such folder, and not the name of a model on the hub; check it"
    except GatedRepoError:
        if has_token:
            return f"model {name} is gated, and the token in HF_TOKEN has no access to it; ask for access at {page}"
        return f"model {name} is gated: accept its terms at {page} and set HF_TOKEN in the environment"
    except RepositoryNotFoundError:
        remedy = "check the name" if has_token else "check the name, or set HF_TOKEN in the environment"
        return f"model {name}: there is none at {page}, or it is private; {remedy}"
    except HfHubHTTPError as error:
        if error.response.status_code == 401:
            return f"model {name}: {page} does not accept the token in HF_TOKEN; make a new one"
    except Exception:  # no network, a proxy, a server that is down: each HTTP client has errors of its own
        return ""
    return ""
