"""Whether the hub can be reached: asked once, without the retries that make every single file take half a minute."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PATIENCE_S = 5.0


def is_hub_id(path: str) -> bool:
    """Whether `path` can only be a repository of the hub: it has the form, and there is no such folder or file."""
    return _HUB_ID.fullmatch(path) is not None and not Path(path).exists()


def cached_folder(repo_id: str, *, revision: str, file: str) -> Path | None:
    """The folder of the local cache where `file` of a repository is; None where it is not."""
    found = huggingface_hub.try_to_load_from_cache(repo_id, file, revision=revision)
    return Path(found).parent if isinstance(found, str) else None


@cache
def reachable() -> bool:
    """Whether the hub answers. If not, this process stays offline: caches serve, and the rest fails at once."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=_PATIENCE_S)
    except Exception:  # of whichever HTTP client this huggingface_hub uses
        import datasets  # a second and a half that nobody needs while the hub answers

        constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True
        return False
    return True
