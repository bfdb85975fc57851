from __future__ import annotations

from pathlib import Path

from tools.host_state import State
from tools.lanes import Session
from tools.run_all import Run, add_up, chosen_steps, describe, lasting_differences


def run(name: str, *, passed: int = 1, failed: int = 0, finished: bool = True) -> Run:
    return Run(name, finished, passed, failed, 0, {})


def session(name: str, result: str = "success", reason: str = "") -> Session:
    return Session(name, result, reason, 1.0, Path("none.log"))


def test_the_closing_line_sums_all_runs() -> None:
    engine = run("engine", passed=3)
    engine.skips = {"tests/engine/test_gpu.py::test_real": "no GPU"}
    outcome = add_up([run("fast-3.11", passed=2, failed=1), engine], [session("fast(3.11)")])
    assert outcome.closing_line() == "5 passed, 1 failed, 1 skipped"
    assert "skipped: no GPU: tests/engine/test_gpu.py::test_real" in list(describe(outcome))


def test_a_failed_check_without_tests_is_one_failure() -> None:
    outcome = add_up([run("fast-3.11")], [session("lint", "failed"), session("fast(3.11)")])
    assert outcome.closing_line() == "1 passed, 1 failed, 0 skipped"


def test_a_session_whose_tests_failed_is_not_counted_twice() -> None:
    outcome = add_up([run("fast-3.11", failed=2)], [session("fast(3.11)", "failed")])
    assert outcome.failed == 2


def test_a_crashed_run_is_a_failure_though_no_test_failed() -> None:
    outcome = add_up([run("engine", finished=False)], [session("engine", "failed")])
    assert outcome.failed == 1


def test_a_run_that_crashed_after_a_failed_test_is_both() -> None:
    outcome = add_up([run("engine", failed=1, finished=False)], [session("engine", "failed")])
    assert outcome.failed == 2


def test_a_session_that_failed_before_its_tests_is_a_failure() -> None:
    outcome = add_up([run("fast-3.11")], [session("engine", "failed", "no such file")])
    assert outcome.failures == ["engine: failed no such file"]


def test_a_missing_python_is_a_skip_by_name() -> None:
    outcome = add_up([run("fast-3.11")], [session("fast(3.12)", "skipped", "no Python 3.12")])
    assert outcome.closing_line() == "1 passed, 0 failed, 1 skipped"


def test_what_the_kernel_frees_a_moment_later_is_no_change() -> None:
    later: list[State] = [{"loop devices": ["/dev/loop0"]}, {"loop devices": []}]
    states = iter(later)
    assert lasting_differences({"loop devices": []}, lambda: next(states)) == []


def test_what_stays_is_a_change() -> None:
    stays = {"loop devices": ["/dev/loop0"]}
    changed = lasting_differences({"loop devices": []}, lambda: stays, within=0)
    assert changed == ["loop devices: + /dev/loop0"]


def test_sessions_that_are_asked_for_run_on_a_file_built_from_what_is_there() -> None:
    assert chosen_steps(["crash", "engine"]) == ((("build",),), (("crash", "engine"),))
