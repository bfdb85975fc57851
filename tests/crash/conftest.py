"""An engine for the run, a single-file shim, and a host to crash it on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from dstack_shim import build
from tests.crash.stage import Stage
from tests.lab import sandbox
from tests.lab.engine import PrivateEngine
from tests.lab.shim import EXECUTABLE
from tools.build_shim import build_shim

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def crash_engine() -> Iterator[PrivateEngine]:
    if not sandbox.inside():
        pytest.exit(
            "tests/crash kills and mounts: run them as\n"
            "  tests/lab/sandbox .venv/bin/python -m pytest tests/crash",
            returncode=4,
        )
    engine = PrivateEngine(shares_network=True)  # there may be one of tests/engine
    engine.start()
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def crash_client(crash_engine: PrivateEngine) -> Iterator[docker.APIClient]:
    client = crash_engine.client()
    yield client
    client.close()


@pytest.fixture(scope="session")
def executable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The single file: it starts fastest, and nothing measures its coverage."""
    named = os.environ.get(EXECUTABLE)
    built = Path(named) if named else ROOT / "dist" / "dstack-shim"
    sources = [*ROOT.glob("shim/**/*.py"), *ROOT.glob("contracts/**/*.py")]
    newest = max(source.stat().st_mtime for source in sources)
    if built.exists() and (named or built.stat().st_mtime > newest):
        return built
    return build_shim(build.DEFAULT_VERSION, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def stage(
    tmp_path_factory: pytest.TempPathFactory,
    crash_engine: PrivateEngine,
    crash_client: docker.APIClient,
    executable: Path,
) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("stage")
    for path in (folder, *folder.parents[:2]):  # users walk to their homes
        path.chmod(0o755)
    stage = Stage(folder, crash_engine, crash_client, executable)
    yield stage
    stage.close()
