"""What is pinned agrees with itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dstack_shim import build

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"^([a-z0-9-]+)==(\S+)(?: ; (.*?))? \\$", re.MULTILINE)


def pins(file: str) -> set[tuple[str, str]]:
    return {(name, version) for name, version, _ in PIN.findall((ROOT / file).read_text())}


def own_version(package: str) -> str:
    text = (ROOT / package / "pyproject.toml").read_text()
    found = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    assert found
    return found[1]


@pytest.mark.parametrize("file", ["constraints.txt", "tools/bundle.txt"])
def test_every_pin_has_a_hash_and_no_address(file: str) -> None:
    text = (ROOT / file).read_text()
    for block in re.split(r"\n(?=\S)", text):
        if "==" in block:
            Requirement(block.split(" \\")[0])
            assert "--hash=sha256:" in block
    assert "://" not in text
    assert "index" not in text


def test_the_single_file_bundles_what_the_tests_run_with() -> None:
    assert pins("tools/bundle.txt") <= pins("constraints.txt")


def test_the_distributions_and_the_shim_agree_on_their_version() -> None:
    versions = {own_version(package) for package in ("contracts", "shim", "server_ext")}
    assert versions == {build.IMPLEMENTATION_VERSION}


@pytest.mark.parametrize("package", ["shim", "server_ext"])
def test_the_distributions_are_released_with_their_contracts(package: str) -> None:
    text = (ROOT / package / "pyproject.toml").read_text()
    assert f'"dstack-shim-contracts=={own_version("contracts")}"' in text
