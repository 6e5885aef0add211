"""Where the trained checkpoint for tests lies, if it is there: $CHEETAH_TEST_MODELS, or beside the repository."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def trained_checkpoint() -> Path:
    """The folder of stories260K-hd64-bf16; the test is skipped where there is none."""
    models = Path(os.environ.get("CHEETAH_TEST_MODELS", REPOSITORY.parent / "shared" / "models"))
    folder = models / "stories260K-hd64-bf16"
    if not folder.is_dir():
        pytest.skip(f"no {folder.name} (set CHEETAH_TEST_MODELS to the folder that holds it)")
    return folder
