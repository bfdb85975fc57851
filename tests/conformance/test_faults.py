"""The suite itself: shims with one fault each, every one caught by a case that cites the row.

Each case named here runs twice on a wrapped shim, in a pytest of its own: without a fault it must
pass, with it it must not. So a case that fails for another reason proves nothing, and shows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conformance.conftest import BORROWED_ENGINE, COLLECTED
from tests.conformance.faults.faults import FAULTS
from tests.conformance.instance import Instance
from tests.conformance.rows import SECTIONS, cited_by
from tests.conformance.shim import FIRST_PORT, Setting
from tests.lab.engine import PrivateEngine

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Proof:
    """A fault, the row it breaks, and the case that must notice."""

    fault: str
    row: str
    case: str


PROOFS = (
    Proof("HeadIsRefused", "A5", "test_api.py::test_head_is_get_without_a_body[/api/tasks]"),
    Proof("JsonSaysText", "A2", "test_api.py::test_result_is_json[/api/tasks]"),
    Proof(
        "SlashIsForgiven",
        "A7",
        "test_api.py::test_unknown_path_and_trailing_slash_are_404[/api/tasks]",
    ),
    Proof("SecondSubmitIsFine", "A32", "test_api.py::test_same_id_is_409_whatever_the_status"),
    Proof(
        "FloatIsAnInteger",
        "A19",
        "test_submit_body.py::test_integers_refuse_everything_else[1.0-memory]",
    ),
    Proof(
        "ReasonIsNull", "A36", "test_api.py::test_task_info_has_the_keys_and_types_servers_parse"
    ),
    Proof(
        "WaitsForNothing",
        "A43",
        "test_api.py::test_terminate_answers_when_the_container_has_ended",
    ),
    Proof("LastReasonWins", "S13", "test_statuses.py::test_first_reason_stays"),
    Proof("ReasonNobodyKnows", "S11", "test_statuses.py::test_failed_preparation_says_why"),
    Proof(
        "GraceIsIgnored",
        "S18",
        "test_statuses.py::test_timeout_is_a_grace_between_signal_and_kill",
    ),
    Proof("StatusGoesBack", "S2", "test_statuses.py::test_statuses_come_in_order"),
    Proof(
        "LimitsAreForgotten", "C26", "test_container_settings.py::test_cpu_and_memory_are_limits"
    ),
    Proof(
        "PortsForEverybody",
        "C21",
        "test_container_settings.py::test_bridge_reports_both_ports_and_nothing_else",
    ),
    Proof("SourcesAreMade", "C18", "test_container.py::test_instance_mount_is_bound"),
    Proof(
        "AddressIsForgotten",
        "C8",
        "test_container.py::test_runner_is_started_with_the_shims_settings[host]",
    ),
    Proof(
        "VolumesStay",
        "C32",
        "test_container_settings.py::test_remove_takes_anonymous_volumes_along",
    ),
    Proof(
        "SecondsAreBytes", "P20", "test_pull.py::test_other_units_never_count_as_bytes[detail0]"
    ),
    Proof("ProgressVanishes", "P12", "test_pull.py::test_progress_follows_a_layer_to_its_end"),
    Proof("RecordIsReadable", "D10", "test_disk.py::test_record_is_one_json_object_and_a_newline"),
    Proof("LogBeginsAnew", "D2", "test_disk.py::test_log_is_appended_to"),
    Proof("PasswordInALabel", "D9", "test_disk.py::test_credentials_are_nowhere"),
    Proof("DirsStay", "D5", "test_disk.py::test_remove_deletes_the_dir"),
    Proof(
        "UsageErrorsAreFine",
        "L29",
        "test_command_line.py::test_usage_error_exits_1[--no-such-flag]",
    ),
    Proof(
        "AnyLevelWillDo",
        "L28",
        "test_command_line.py::test_other_levels_stop_the_start[runner-loud]",
    ),
    Proof(
        "InstallingIsHidden",
        "K7",
        "test_components.py::test_runner_is_installed_in_the_background",
    ),
    Proof("AnyInstallIsFine", "K8", "test_components.py::test_second_install_meanwhile_is_409"),
    Proof("RecordsAreForgotten", "R4", "test_restart.py::test_recorded_reason_survives"),
    Proof(
        "ContainersEndWithTheShim",
        "L37",
        "test_command_line.py::test_signal_ends_the_shim_and_no_container[15]",
    ),
    Proof(
        "OutcomesComeLate", "R2", "test_restart.py::test_first_answer_has_what_happened_meanwhile"
    ),
    Proof(
        "PlaceholderIsAVersion",
        "H13",
        "test_host.py::test_placeholder_is_no_driver_version[N/A-None]",
    ),
    Proof("HostInfoIsRewritten", "H19", "test_host.py::test_existing_host_info_is_left_alone"),
    Proof("GpusAreShared", "C37", "test_gpus.py::test_nvidia_gpus_are_one_device_request"),
    Proof(
        "VolumesStayMounted",
        "V16",
        "test_volumes.py::test_volume_is_unmounted_when_the_task_has_ended[terminate]",
    ),
    Proof(
        "EverythingLooksBlank",
        "V11",
        "test_volumes.py::test_partition_table_is_never_formatted_away",
    ),
    Proof("ModeIsForgotten", "Y12", "test_keys.py::test_owner_and_mode_survive[416]"),
    Proof("KeysStay", "Y1", "test_keys.py::test_key_is_there_while_its_task_lives[terminate]"),
)
# A handful of sections, one fault of each, in a plain run; all of them with --full.
SAMPLE = {next(proof for proof in PROOFS if proof.row[0] == letter) for letter in "ASCDV"}

Judge = Callable[[str, list[str]], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def judge(setting: Setting, instance: Instance, private_engine: PrivateEngine) -> Judge:
    """Run cases of the suite on the shim under test with a fault, on the same engine."""

    def run(fault: str, cases: list[str]) -> subprocess.CompletedProcess[str]:
        file = instance.root / f"broken-{fault}"
        file.write_text(
            f"#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "
            f'-m tests.conformance.faults.broken {fault} {setting.executable} "$@"\n'
        )
        file.chmod(0o755)
        nodes = [f"{HERE.relative_to(ROOT)}/{case}" for case in cases]
        options = ["-q", "--tb=short", "-p", "no:cacheprovider", f"--shim={file}"]
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("DSTACK_SHIM_")
        }
        return subprocess.run(
            [sys.executable, "-m", "pytest", *options, *nodes],
            cwd=ROOT,
            env=environment | {BORROWED_ENGINE: private_engine.address, FIRST_PORT: "26000"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


@pytest.mark.timeout(320)
def test_wrapped_shim_without_a_fault_passes(judge: Judge, full_counts: bool) -> None:
    proofs = PROOFS if full_counts else [proof for proof in PROOFS if proof in SAMPLE]
    done = judge("none", sorted({proof.case for proof in proofs}))
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize(
    "proof",
    [
        pytest.param(proof, id=proof.fault, marks=() if proof in SAMPLE else pytest.mark.full)
        for proof in PROOFS
    ],
)
def test_fault_is_caught(proof: Proof, judge: Judge) -> None:
    done = judge(proof.fault, [proof.case])
    assert done.returncode == 1, done.stdout[-4000:]  # 1: tests failed; others: none ran
    assert " failed" in done.stdout.splitlines()[-1]


def test_every_fault_has_a_proof_in_every_section() -> None:
    assert {proof.fault for proof in PROOFS} == set(FAULTS) - {"none"}
    assert {proof.row[0] for proof in PROOFS} == set(SECTIONS)
    assert len(PROOFS) >= 20


def test_each_case_cites_the_row_its_fault_breaks(request: pytest.FixtureRequest) -> None:
    cited = {
        f"{item.path.name}::{item.name}": {row.id for row in cited_by(item)}
        for item in request.config.stash[COLLECTED]
    }
    if not {proof.case.split("::")[0] for proof in PROOFS} <= {
        case.split("::")[0] for case in cited
    }:
        pytest.skip("only a part of the suite was collected")
    assert [proof for proof in PROOFS if proof.row not in cited.get(proof.case, ())] == []
