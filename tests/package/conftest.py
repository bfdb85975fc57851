from __future__ import annotations

from pathlib import Path

import pytest

from tools.build_shim import build_shim

VERSION = "1.2.3.post4"


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A single-file build of this checkout that reports ``1.2.3.post4``."""
    return build_shim(VERSION, tmp_path_factory.mktemp("dist"))
