"""The registry of features and the document inside a shim file."""

from __future__ import annotations

import attrs
import pytest
from dstack_shim_contracts.codec import encode
from dstack_shim_contracts.errors import BodyError
from dstack_shim_contracts.features import (
    FEATURE_DOCUMENT_NAME,
    FEATURES,
    GUARDED_SHUTDOWN,
    PERSISTED_STATE,
    TAKEOVER_PROTOCOL,
    FeatureDocument,
    FileImplementation,
    read_feature_document,
)
from dstack_shim_contracts.statuses import TaskStatus


def test_persisted_state_makes_running_tasks_safe() -> None:
    assert FEATURES[PERSISTED_STATE].restart_safe == {TaskStatus.RUNNING}
    assert PERSISTED_STATE == "persisted-state"


def test_a_guarded_shutdown_makes_no_task_safer() -> None:
    assert FEATURES[GUARDED_SHUTDOWN].restart_safe == frozenset()
    assert GUARDED_SHUTDOWN == "guarded-shutdown"


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_is_under_its_own_name_and_says_what_it_means(name: str) -> None:
    assert FEATURES[name].name == name
    assert FEATURES[name].meaning.endswith(".")


def test_the_document_of_a_file_is_read_back() -> None:
    implementation = FileImplementation("dstack-shim", "0.1.0")
    document = FeatureDocument("dstack-shim", "0.22.5", (PERSISTED_STATE,), implementation)
    assert read_feature_document(encode(document)) == document
    assert document.takeover == 0
    able = attrs.evolve(document, takeover=TAKEOVER_PROTOCOL)
    assert read_feature_document(encode(able)) == able
    assert FEATURE_DOCUMENT_NAME == "dstack-shim.json"


def test_a_document_of_something_else_is_refused() -> None:
    with pytest.raises(BodyError, match=r"^name: expected dstack-shim$"):
        read_feature_document(b'{"name":"dstack-runner","version":"1.0.0"}')


def test_a_document_without_a_version_is_refused() -> None:
    with pytest.raises(BodyError, match=r"^version: expected a non-empty string$"):
        read_feature_document(b'{"name":"dstack-shim"}')
