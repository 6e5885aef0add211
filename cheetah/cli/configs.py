"""What a command line calls a model, and the configuration that it means: never more than a config.json is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cheetah.models.config import ModelConfig

RANDOM = "random:"


@dataclass(frozen=True)
class NamedConfig:
    """A configuration and its names.

    config. canonical: how it is named in a command that means the same on another machine. stem: for file names.
    notes: lines worth printing.
    """

    config: ModelConfig
    canonical: str
    stem: str
    notes: tuple[str, ...]


def named_config(name: str, revision: str | None = None) -> NamedConfig:
    """The configuration of a preset, a folder, a config.json, or a hub id (of which config.json alone is fetched).

    A folder's canonical name is its own, without the path. "random:" in front changes nothing; "@" and a weight format
    behind it puts the matrices of the layers into that format.
    """
    from cheetah.models.registry import in_format, resolve_config, split_format

    (source, format), notes = split_format(name.removeprefix(RANDOM)), list[str]()
    place = _config_of_hub(source, revision) if _is_hub_id(source) else source
    config, canonical = in_format(resolve_config(place, notes), format), canonical_name(name)
    return NamedConfig(config, canonical, canonical.rpartition("/")[2].lower(), tuple(notes))


def canonical_name(name: str) -> str:
    """How a model is named in a command that means the same on another machine: a folder by its name alone."""
    from cheetah.models.registry import split_format

    source, format = split_format(name.removeprefix(RANDOM))
    return _canonical_source(source) + (f"@{format}" if format else "")


def _canonical_source(source: str) -> str:
    from cheetah.models.registry import is_preset

    path = Path(source).expanduser()
    if is_preset(source) or not path.exists():
        return source
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    return folder.name if path.is_dir() or path.name == "config.json" else path.stem


def _is_hub_id(source: str) -> bool:
    from cheetah.models.registry import is_preset
    from cheetah.runtime.checkpoint import hub

    return not is_preset(source) and not Path(source).expanduser().exists() and hub.is_hub_id(source)


def _config_of_hub(repository: str, revision: str | None) -> Path:
    from cheetah.runtime.checkpoint import hub
    from cheetah.runtime.checkpoint.safetensors_files import LoadingError

    if hub.is_offline():
        return hub.cached_folder(repository, revision) / "config.json"
    import huggingface_hub

    try:
        path = huggingface_hub.hf_hub_download(
            repository, "config.json", revision=revision, cache_dir=hub.cache_folder()
        )
    except Exception as problem:  # whatever the library and the network throw becomes one message
        reason = " ".join(str(problem).split()) or type(problem).__name__
        raise LoadingError(f"{repository}: its config.json cannot be fetched: {reason}") from problem
    return Path(path)


def print_notes(notes: tuple[str, ...]) -> None:
    """A line on stderr for each guess that was made."""
    from cheetah.runtime.device import say_to_stderr

    for note in notes:
        say_to_stderr(note)
