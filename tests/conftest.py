"""What every test run shares: full counts or a sample, and where a test may run."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

with contextlib.suppress(ImportError):  # the environments of dstack's releases lack it
    from hypothesis import settings

    # The sample is the same in every run; full counts look elsewhere each time. No deadline for
    # one example: this machine may be busy with anything.
    settings.register_profile("few", max_examples=20, derandomize=True, deadline=None)
    settings.register_profile("sample", max_examples=100, derandomize=True, deadline=None)
    settings.register_profile("full", max_examples=2000, deadline=None)

pytest_plugins = ["tests.plugins.counts"]

HERE = Path(__file__).parent

# Everything below these needs the private namespaces of tests/lab/sandbox; elsewhere a single test
# or module says so itself with the marker.
SANDBOXED = ("engine", "server", "conformance", "crash", "e2e")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="the full counts of `./dev prove`; without it, the fixed sample of `./dev test`",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--hypothesis-profile", None):
        with contextlib.suppress(NameError):
            settings.load_profile("full" if config.getoption("--full") else "sample")


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(HERE).parts[0] in SANDBOXED:
            item.add_marker(pytest.mark.sandbox)
    if config.getoption("--full"):
        return
    # Left out, not skipped: a skip is for what this machine lacks.
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def full_counts(request: pytest.FixtureRequest) -> bool:
    """True in `./dev prove`: run every seed, point and round, not the sample."""
    return bool(request.config.getoption("--full"))
