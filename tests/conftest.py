"""What every test run shares: full counts or a sample, and where a test may run."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest

from tests.evidence import Evidence, parse_part

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
    parser.addoption(
        "--part",
        default="1/1",
        help="with --full: only this part of what has many cases, as 3/10; evidence is added up",
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # So a shell starts what goes on in the background, and every child of ours would inherit
        # it: programs that are to be interrupted never would be.
        signal.signal(signal.SIGINT, signal.default_int_handler)
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


@pytest.fixture(scope="session")
def evidence(full_counts: bool, request: pytest.FixtureRequest) -> Evidence:
    """Says which share of all cases is this run's, and keeps what was counted."""
    part, parts = parse_part(request.config.getoption("--part"))
    if parts > 1 and not full_counts:
        pytest.exit("--part is for full counts: give --full too", returncode=4)
    return Evidence(full=full_counts, part=part, parts=parts)
