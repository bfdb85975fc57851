"""External commands: results, limits, kills. Real processes, because they are the point."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from dstack_shim.host.commands import (
    CommandError,
    CommandMissing,
    CommandTimedOut,
    Finished,
    Runner,
    run,
)
from tests.eventually import eventually, eventually_async


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def finish(argv: list[str], timeout: float = 20.0, **options: object) -> Finished:
    return asyncio.run(run(argv, timeout=timeout, **options))  # type: ignore[arg-type]  # options vary


def gone(pid: int) -> bool:
    """Not there at all, or somebody else's zombie: an orphan the machine's PID 1 will reap."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return True
    return fields[0] == "Z" and int(fields[1]) != os.getpid()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_result_has_code_and_both_streams_apart() -> None:
    code = "import sys; print('to out'); print('to err', file=sys.stderr); sys.exit(3)"

    finished = finish(python(code))

    assert finished == Finished(3, "to out\n", "to err\n")
    assert not finished.ok


def test_run_is_a_runner() -> None:
    runner: Runner = run

    assert asyncio.run(runner(["true"], timeout=20)).ok


def test_arguments_reach_the_program_unchanged_without_a_shell() -> None:
    awkward = "$HOME `id` ; 'quoted' \"twice\" * \n emoji 🦊"

    finished = finish([*python("import sys; sys.stdout.write(sys.argv[1])"), awkward])

    assert finished.out == awkward


def test_command_gets_no_input() -> None:
    finished = finish(python("import sys; print(repr(sys.stdin.read()))"))

    assert finished.out == "''\n"


def test_environment_is_replaced_when_given() -> None:
    code = "import os; print('HOME' in os.environ, os.environ.get('ONLY'))"

    finished = finish(python(code), env={"ONLY": "this"})

    assert finished.out == "False this\n"


def test_program_is_found_on_the_path_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "a-tool"
    tool.write_text("#!/bin/sh\necho found\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    assert finish(["a-tool"]).out == "found\n"


def test_undecodable_output_is_replaced_not_an_error() -> None:
    finished = finish(python("import sys; sys.stdout.buffer.write(b'a\\xff\\xfeb')"))

    assert finished.out == "a��b"


def test_output_beyond_the_limit_is_dropped_and_marked() -> None:
    code = "import sys; sys.stdout.write('x' * 3_000_000); print('end', file=sys.stderr)"

    finished = finish(python(code), max_output=1000)

    assert finished.out == "x" * 1000
    assert finished.err == "end\n"
    assert finished.truncated


def test_output_of_exactly_the_limit_is_not_marked() -> None:
    finished = finish(python("print('x' * 9)"), max_output=10)

    assert finished.out == "x" * 9 + "\n"
    assert not finished.truncated


@pytest.mark.parametrize("content", [None, "plain text, not executable"])
def test_missing_or_unexecutable_program_is_command_missing(
    tmp_path: Path, content: str | None
) -> None:
    program = tmp_path / "program"
    if content is not None:
        program.write_text(content)

    with pytest.raises(CommandMissing, match="program cannot be run"):
        finish([str(program)])


def test_file_that_is_no_program_is_command_missing(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x00\x01\x02 no format anybody knows")
    program.chmod(0o755)

    with pytest.raises(CommandMissing, match="cannot be run"):
        finish([str(program)])


@pytest.mark.parametrize("argv", [[], ["true", "nul\0inside"]])
def test_impossible_arguments_are_a_command_error(argv: list[str]) -> None:
    with pytest.raises(CommandError):
        finish(argv)


def test_slow_command_is_killed_with_its_children_and_reaped(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 600 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait"

    with pytest.raises(CommandTimedOut, match=r"sh took longer than 0\.5 s"):
        finish(["sh", "-c", script], timeout=0.5)

    parent, child = map(int, pids.read_text().split())
    assert not Path(f"/proc/{parent}").exists(), "neither running nor a zombie"
    eventually(lambda: gone(child))


def test_command_that_ignores_sigterm_is_killed_all_the_same() -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"

    with pytest.raises(CommandTimedOut):
        finish(python(code), timeout=0.5)


def test_command_that_closes_its_output_is_still_timed_out() -> None:
    code = "import os, time; os.close(1); os.close(2); time.sleep(600)"

    with pytest.raises(CommandTimedOut):
        finish(python(code), timeout=0.5)


def test_command_that_closes_its_output_early_has_its_exit_code() -> None:
    code = "import os, time; os.close(1); os.close(2); time.sleep(0.2); os._exit(4)"

    assert finish(python(code)).code == 4


def test_child_left_behind_is_let_be_and_does_not_hold_the_answer(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    started = time.monotonic()

    finished = finish(["sh", "-c", f"sleep 600 & echo $! > {pid_file}; echo done"])

    pid = int(pid_file.read_text())
    try:
        assert finished == Finished(0, "done\n")
        assert time.monotonic() - started < 10
        assert Path(f"/proc/{pid}").exists()
    finally:
        os.kill(pid, signal.SIGKILL)


def test_program_still_open_for_writing_is_tried_again(tmp_path: Path) -> None:
    """In real life: the child of another thread between its fork and its exec."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho ran\n")
    program.chmod(0o755)
    writer = program.open("a")
    threading.Timer(0.2, writer.close).start()

    assert finish([str(program)]).out == "ran\n"


def test_program_that_stays_open_for_writing_is_an_error(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)

    with program.open("a"), pytest.raises(CommandError, match="Text file busy"):
        finish([str(program)])


def test_cancelled_caller_leaves_no_process(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; exec sleep 600"

    async def cancel_midway() -> None:
        task = asyncio.create_task(run(["sh", "-c", script], timeout=600))
        await eventually_async(pid_file.exists)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_midway())
    assert not Path(f"/proc/{int(pid_file.read_text())}").exists()


def test_caller_cancelled_before_the_start_leaves_no_process() -> None:
    async def cancel_at_once() -> None:
        task = asyncio.create_task(run(["sleep", "600"], timeout=600))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_at_once())
    eventually(lambda: not any(t.name == "command sleep" for t in threading.enumerate()))


def test_caller_cancelled_twice_returns_at_once_and_the_command_still_dies() -> None:
    async def cancel_twice() -> None:
        task = asyncio.create_task(run(["sleep", "600"], timeout=600))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_twice())
    eventually(lambda: not any(t.name == "command sleep" for t in threading.enumerate()))


def test_many_commands_run_beside_each_other() -> None:
    async def forty() -> list[Finished]:
        return await asyncio.gather(
            *(run(["sh", "-c", f"exit {n}"], timeout=60) for n in range(40))
        )

    assert [finished.code for finished in asyncio.run(forty())] == list(range(40))


def test_works_in_an_event_loop_outside_the_main_thread() -> None:
    results: list[Finished] = []
    thread = threading.Thread(target=lambda: results.append(finish(["true"])))

    thread.start()
    thread.join(20)

    assert results == [Finished(0)]


def test_no_descriptor_stays_open() -> None:
    finish(["true"])
    before = open_descriptors()

    for _ in range(5):
        finish(["true"])
        with pytest.raises(CommandTimedOut):
            finish(["sleep", "600"], timeout=0.05)

    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("finished", "words"),
    [
        (Finished(32, err="mount: /x: bad superblock.\nsee dmesg\n"), "exited with 32: see dmesg"),
        (Finished(1, out="only on stdout\n"), "exited with 1: only on stdout"),
        (Finished(2), "exited with 2"),
        (Finished(-9, err="  \n"), "killed by SIGKILL"),
        (Finished(-250), "killed by signal 250"),
    ],
)
def test_failure_says_how_it_ended_and_its_last_words(finished: Finished, words: str) -> None:
    assert finished.failure == words
