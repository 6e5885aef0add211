"""Texts of kernels are written once: another time they come from the disk, unless anything they follow from differs."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_kernel import Generated, generate_kernel
from tiny_models import tiny_config

from cheetah.runtime.assembly.texts import KeptTexts


def written(texts: KeptTexts, *asked: object) -> tuple[Generated, bool]:
    """What is got, and whether it was written anew."""
    made: list[Generated] = []

    def make() -> Generated:
        made.append(generate_kernel(tiny_config(), "emulator"))
        return made[-1]

    found = texts.get(asked, make)
    return Generated(found.text, found.manifest), bool(made)


def test_the_same_question_is_answered_from_the_disk(tmp_path: Path) -> None:
    texts = KeptTexts(tmp_path / "texts")
    first, was_written = written(texts, "decode", {"layers": 2}, 8)
    assert was_written
    assert written(KeptTexts(tmp_path / "texts"), "decode", {"layers": 2}, 8) == (first, False)
    assert written(texts, "decode", {"layers": 3}, 8)[1]


def test_edited_sources_find_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = KeptTexts(tmp_path)
    assert written(texts, "decode")[1]
    monkeypatch.setattr("cheetah.runtime.assembly.texts._sources", lambda: "others")
    assert written(texts, "decode")[1]
    monkeypatch.setattr("cheetah.runtime.assembly.texts._sources", lambda: None)
    assert written(texts, "decode")[1], "without sources nothing is known"


@pytest.mark.parametrize("suffix", [".cu", ".json"])
def test_what_is_damaged_is_written_again(tmp_path: Path, suffix: str) -> None:
    texts = KeptTexts(tmp_path)
    assert written(texts, "decode")[1]
    (path,) = tmp_path.glob(f"*{suffix}")
    path.write_bytes(path.read_bytes().replace(b"e", b"f", 1))
    assert written(texts, "decode")[1] and not written(texts, "decode")[1]


def test_nothing_is_kept_where_it_cannot_be(tmp_path: Path) -> None:
    assert all(written(KeptTexts(None), "decode")[1] for _ in range(2))
    (tmp_path / "file").write_text("")
    assert all(written(KeptTexts(tmp_path / "file"), "decode")[1] for _ in range(2))
