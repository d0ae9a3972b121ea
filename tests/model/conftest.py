import shutil
from pathlib import Path

import pytest


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to be damaged."""
    return shutil.copytree(tiny, tmp_path / "tiny")
