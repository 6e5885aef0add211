"""Hub ids: the cache and its variables, offline rules, and what is fetched."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from written_checkpoints import Q, random_values, refusal, write_model, write_shards

from cheetah.runtime.checkpoint.loading import open_checkpoint


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty cache, and no network: a call to the hub's library fails the test."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fetched = "cheetah.runtime.checkpoint.hub.fetched_folder"
    monkeypatch.setattr(fetched, lambda *_: pytest.fail("the network was asked"))
    return tmp_path / "cache" / "huggingface" / "hub"


def cached_model(cache, commit="abc123", branch="main"):
    repository = cache / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / branch).write_text(commit)
    (repository / "snapshots").mkdir(exist_ok=True)
    return write_model(repository / "snapshots" / commit)


def test_offline_hub_ids_come_from_the_cache(hub_cache):
    folder = cached_model(hub_cache)
    for revision in (None, "main", "abc123"):
        assert open_checkpoint("someone/tiny", revision).folder == folder


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"])
def test_cache_variables(hub_cache, tmp_path, monkeypatch, variable):
    folder = cached_model(tmp_path / "elsewhere")
    monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    assert open_checkpoint("someone/tiny").folder == folder


def test_hf_home_and_transformers_offline(hub_cache, tmp_path, monkeypatch):
    folder = cached_model(tmp_path / "home" / "hub")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "true")
    assert open_checkpoint("someone/tiny").folder == folder


def test_local_files_only_needs_no_variable(hub_cache, monkeypatch):
    cached_model(hub_cache)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    open_checkpoint("someone/tiny", local_files_only=True)


def test_offline_and_not_in_the_cache(hub_cache):
    message = refusal("someone/other", "v2")
    assert "config.json of someone/other, revision v2, is not in the cache" in message and str(hub_cache) in message


def test_offline_and_a_file_missing_names_file_repository_and_revision(hub_cache):
    folder = cached_model(hub_cache)
    (folder / "model.safetensors").unlink()
    message = refusal("someone/tiny")
    assert (
        message.startswith("someone/tiny, revision main (offline, from the cache): ") and "model.safetensors" in message
    )
    write_shards(folder)
    (folder / "model-00001-of-00003.safetensors").unlink()
    assert "model-00001-of-00003.safetensors: is missing" in refusal("someone/tiny")


def test_a_folder_of_that_name_comes_before_the_hub(hub_cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone").mkdir()
    write_model(tmp_path / "someone" / "tiny")
    assert open_checkpoint("someone/tiny").folder == Path("someone/tiny")


class FakeHub:
    """Stands for huggingface_hub: a repository in a folder, and a list of what was fetched."""

    def __init__(self, source, cache):
        self.source, self.target, self.fetched = source, cache / "snapshots" / "c0ffee", []

    def hf_hub_download(self, repository, file, revision, cache_dir):
        from huggingface_hub.errors import EntryNotFoundError

        if not (self.source / file).is_file():
            raise EntryNotFoundError(f"404: {file}")
        self.target.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.source / file, self.target / file)
        self.fetched.append(file)
        return str(self.target / file)

    def snapshot_download(self, repository, revision, cache_dir, allow_patterns, ignore_patterns=()):
        from huggingface_hub.utils import filter_repo_objects

        files = [path.relative_to(self.source).as_posix() for path in self.source.rglob("*") if path.is_file()]
        kept = filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns or None)
        for file in sorted(kept):
            self.hf_hub_download(repository, file, revision, cache_dir)


@pytest.fixture
def fake_hub(tmp_path, monkeypatch):
    import huggingface_hub

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    fake = FakeHub(tmp_path / "source", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def test_only_weights_and_text_files_are_fetched(fake_hub):
    write_shards(fake_hub.source)
    for name in ("tokenizer.json", "modeling.py", "pytorch_model.bin", "README.md", "chat_template.jinja"):
        (fake_hub.source / name).write_text("{}")
    (fake_hub.source / "original").mkdir()
    (fake_hub.source / "original" / "params.json").write_text("{}")
    checkpoint = open_checkpoint("someone/tiny")
    assert np.array_equal(checkpoint.tensor(Q), random_values()[Q].view(np.uint16))
    assert {Path(file).suffix for file in fake_hub.fetched} == {".json", ".jinja", ".safetensors"}
    assert not any("original" in file for file in fake_hub.fetched)


def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(fake_hub):
    write_model(fake_hub.source, model_type="gpt_neox")
    assert "model_type is 'gpt_neox'" in refusal("someone/tiny")
    assert fake_hub.fetched == ["config.json"]


def test_a_repository_without_config_is_one_message(fake_hub):
    fake_hub.source.mkdir()
    assert "someone/tiny, revision main, cannot be fetched: 404: config.json" in refusal("someone/tiny")
