"""Container names, which every shim must derive alike."""

from __future__ import annotations

import re

from dstack_shim_contracts.naming import container_name
from dstack_shim_contracts.submit import MAX_NAME_LENGTH
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.strategies import SAMPLE


def test_the_name_is_the_tasks_name_and_eight_digits_of_the_hash_of_name_and_id() -> None:
    # printf 'train-0-0/3f2b8c1e-5a77-4c0e-9d0b-6a1d2f3e4c5b' | sha256sum
    name = container_name("train-0-0", "3f2b8c1e-5a77-4c0e-9d0b-6a1d2f3e4c5b")
    assert name == "train-0-0-bc82423f"


def test_text_beyond_ascii_is_hashed_as_utf_8() -> None:
    # printf 'train/tâche-🚀' | sha256sum
    assert container_name("train", "tâche-🚀") == "train-a5f2f390"


@SAMPLE
@given(st.text(st.characters()), st.text(st.characters()))
def test_no_name_or_id_makes_it_fail(name: str, task_id: str) -> None:
    made = container_name(name, task_id)
    assert made.startswith(name)
    assert re.fullmatch("-[0-9a-f]{8}", made.removeprefix(name))


def test_the_longest_name_still_fits_a_file_name() -> None:
    assert len(container_name("n" * MAX_NAME_LENGTH, "id")) <= 255
