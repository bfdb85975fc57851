"""What importing costs: a shim must not load what only tools and tests need."""

from __future__ import annotations

import subprocess
import sys

import pytest

ALWAYS = ["statuses", "naming", "api", "codec", "record", "errors", "features", "versions", "gate"]
HEAVY = ["httpx", "jsonschema", "cattrs", "importlib.resources", "asyncio", "http", "email"]


def loaded_after(statement: str) -> set[str]:
    script = f"{statement}\nimport sys; print(*sys.modules)"
    finished = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(finished.stdout.split())


def test_the_package_itself_loads_nothing() -> None:
    loaded = {name for name in loaded_after("import dstack_shim_contracts") if "contracts" in name}
    assert loaded == {"dstack_shim_contracts"}


@pytest.mark.parametrize("module", ALWAYS)
def test_no_module_a_shim_or_a_server_loads_brings_something_heavy(module: str) -> None:
    plain = loaded_after("pass")
    loaded = loaded_after(f"import dstack_shim_contracts.{module}")
    assert not (loaded - plain) & set(HEAVY)


def test_reading_bodies_does_not_load_versions_or_the_gate() -> None:
    loaded = loaded_after("import dstack_shim_contracts.codec, dstack_shim_contracts.record")
    assert not {name for name in loaded if name.startswith("packaging")}
