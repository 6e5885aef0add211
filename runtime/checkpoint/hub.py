"""Checkpoints of the Hugging Face hub: from a repository's id to a local folder, through the shared cache.

Only weights, JSON and Jinja files are fetched, never code. Offline, the cache alone is asked, and what is missing is
named with its repository and revision.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cheetah.models.registry import read_config
from cheetah.runtime.checkpoint.safetensors_files import INDEX_FILE, SINGLE_FILE, LoadingError, shard_names
from cheetah.untrusted import read_text

SMALL_FILES = ["*.json", "*.jinja", "chat_templates/*.jinja"]
NEVER = ["original/*", "*.py", "onnx/*", "*/*.json"]
TRUE = ("1", "ON", "YES", "TRUE")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
_Result = TypeVar("_Result")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form organisation/name."""
    return _HUB_ID.fullmatch(name) is not None


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set to a true value."""
    return any(os.environ.get(name, "").upper() in TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def cache_folder() -> Path:
    """HF_HUB_CACHE, else HUGGINGFACE_HUB_CACHE, else $HF_HOME/hub; HF_HOME is ~/.cache/huggingface by default."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if folder := os.environ.get(name):
            return Path(folder).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
    return Path(home).expanduser() / "hub"


def cached_folder(repository: str, revision: str | None) -> Path:
    """The folder of a repository in the cache, without any network; LoadingError if even its config is not there."""
    revision = revision or "main"
    repository_folder = cache_folder() / f"models--{repository.replace('/', '--')}"
    reference = repository_folder / "refs" / revision
    commit = read_text(reference, 1000, LoadingError).strip() if reference.is_file() else revision
    folder = repository_folder / "snapshots" / commit
    if not (folder / "config.json").is_file():
        raise LoadingError(
            f"config.json of {repository}, revision {revision}, is not in the cache {cache_folder()}, and the network "
            "is not to be used: unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE once to fetch it, or give a local folder"
        )
    return folder


def fetched_folder(repository: str, revision: str | None) -> Path:
    """The folder of a repository in the cache after fetching what is missing.

    The configuration comes first and is checked, so that nothing large is fetched for a model that is not supported.
    """
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    def fetch(call: Callable[..., _Result], *arguments: str, **named: Any) -> _Result:
        return _reported(repository, revision, lambda: call(repository, *arguments, cache_dir=cache_folder(), **named))

    config = Path(str(fetch(huggingface_hub.hf_hub_download, "config.json", revision=revision)))
    _ = read_config(config).shape  # which refuses weight formats that the kernel has not
    commit = config.parent.name
    fetch(huggingface_hub.snapshot_download, revision=commit, allow_patterns=SMALL_FILES, ignore_patterns=NEVER)
    try:
        huggingface_hub.hf_hub_download(repository, SINGLE_FILE, revision=commit, cache_dir=cache_folder())
    except LocalEntryNotFoundError as problem:  # the network failed; it derives from the next one
        raise _failure(repository, revision, problem) from problem
    except EntryNotFoundError:
        if (config.parent / INDEX_FILE).is_file():
            fetch(huggingface_hub.snapshot_download, revision=commit, allow_patterns=shard_names(config.parent))
    except Exception as problem:
        raise _failure(repository, revision, problem) from problem
    return config.parent


def _reported(repository: str, revision: str | None, call: Callable[[], _Result]) -> _Result:
    try:
        return call()
    except Exception as problem:  # whatever the library and the network throw becomes one message
        raise _failure(repository, revision, problem) from problem


def _failure(repository: str, revision: str | None, problem: Exception) -> LoadingError:
    reason = " ".join(str(problem).split()) or type(problem).__name__
    advice = {
        "GatedRepoError": ": accept its licence on the hub and set HF_TOKEN",
        "RepositoryNotFoundError": ": check the name; if it is private, set HF_TOKEN",
        "RevisionNotFoundError": ": check the revision",
    }.get(type(problem).__name__, "")
    return LoadingError(f"{repository}, revision {revision or 'main'}, cannot be fetched{advice}: {reason}")
