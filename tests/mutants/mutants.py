"""The rules that are turned off, one at a time, and which tests notice."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_SHIM = "tests/shim/"
_TASKS = "tests/shim/tasks/"
_MATRIX = "tests/matrix/test_matrix.py::test_a_restart_makes_of_every_task_what_the_table_says"
_POWER = "tests/crash/test_power_cuts.py::test_what_was_acknowledged_is_there_after_a_power_cut"

MUTANTS = (
    Mutant(
        "directory-flush-off",
        "a record that was renamed into place is flushed with its directory",
        "store.py",
        """            raise
        os.fsync(dir_fd)
""",
        """            raise
""",
        (
            f"{_SHIM}test_store.py::test_a_write_flushes_the_file_before_and_the_directory_after_the_rename",
            _POWER,
        ),
    ),
    Mutant(
        "new-directory-flush-off",
        "the directory of task directories is flushed after one appears or goes",
        "store.py",
        """def _flush_directory(directory: Path) -> None:
    with _opened(directory) as fd:
        os.fsync(fd)
""",
        """def _flush_directory(directory: Path) -> None:
    with _opened(directory):
        pass
""",
        (
            f"{_SHIM}test_store.py::test_a_new_directory_is_flushed_before_and_after_it_takes_its_name",
            f"{_SHIM}test_store.py::test_forgetting_is_flushed",
            _POWER,
        ),
    ),
    Mutant(
        "write-before-acquire-off",
        "which GPUs a task takes is written before anything is done with them",
        "tasks/holdings.py",
        """        if gpus:
            await self._book.change(entry, partial(with_gpus, gpus=gpus))
            self._log.info("gpus.acquired", task=task.id, gpus=gpus)
        for resource in self._resources:
            _must_go_on(entry)
            await self._unless_given_up(
                entry, resource.acquire(entry.task.record, partial(self._others, entry))
            )
""",
        """        for resource in self._resources:
            _must_go_on(entry)
            await self._unless_given_up(
                entry, resource.acquire(entry.task.record, partial(self._others, entry))
            )
        if gpus:
            await self._book.change(entry, partial(with_gpus, gpus=gpus))
            self._log.info("gpus.acquired", task=task.id, gpus=gpus)
""",
        (
            f"{_TASKS}test_core.py::test_which_gpus_a_task_takes_is_on_disk_before_it_takes_anything_else",
        ),
    ),
    Mutant(
        "acquire-without-record",
        "nothing is taken, and no step is made, whose record could not be written",
        "tasks/book.py",
        """            if not insist:
                raise
""",
        "",
        (
            f"{_TASKS}test_core.py::test_a_full_disk_at_any_record_of_a_start_ends_it_and_a_later_round_writes_that_down",
        ),
    ),
    Mutant(
        "acknowledge-after-flush-off",
        "a submit is answered when its record is on disk",
        "tasks/core.py",
        "            await self._blocking(self._records.create, task.dir, task.record)\n",
        "            self.spawn(self._blocking(self._records.create, task.dir, task.record))\n",
        (
            f"{_TASKS}test_core.py::test_a_submitted_task_is_on_disk_before_it_is_answered_and_then_starts",
            f"{_TASKS}test_core.py::test_a_submit_that_cannot_be_written_down_is_refused_and_leaves_nothing",
        ),
    ),
    Mutant(
        "acknowledge-a-change-after-flush-off",
        "a terminate is answered when its record is on disk",
        "tasks/book.py",
        "        return self._counts(entry, await self._saved(entry, task, insist=insist))\n",
        "        asyncio.ensure_future(self._saved(entry, task, insist=True))\n        return self._counts(entry, task)\n",
        (f"{_TASKS}test_endings.py::test_a_full_disk_keeps_no_container_running_and_is_told",),
    ),
    Mutant(
        "cancelled-halfway",
        "a change that is on disk counts even if whoever made it was cancelled",
        "tasks/book.py",
        "            return await to_its_end(self._written(entry, new, insist=insist))\n",
        "            return await self._written(entry, new, insist=insist)\n",
        (
            f"{_TASKS}test_book.py::test_a_change_that_is_on_disk_counts_even_if_who_made_it_was_cancelled",
            "tests/simulation/test_simulation.py::test_a_seed_that_failed_once_fails_no_more",
        ),
    ),
    Mutant(
        "owner-check-off",
        "a release gives back what its owner holds and nothing else",
        "resources/gpus.py",
        "        self._owner_of = {gpu: by for gpu, by in self._owner_of.items() if by != owner}\n",
        "        self._owner_of = {}\n",
        (
            f"{_SHIM}resources/test_gpus.py::test_release_frees_the_owners_and_nobody_elses_and_may_be_repeated",
            _MATRIX,
        ),
    ),
    Mutant(
        "name-owner-check-off",
        "a container that has the task's name is ours only if its label says so",
        "tasks/start.py",
        "            if other.task_id != entry.task.id or other.home not in (None, self._home):\n",
        "            if False:\n",
        (
            f"{_TASKS}test_core.py::test_a_name_taken_by_a_stranger_fails_the_task_and_leaves_the_stranger_alone",
        ),
    ),
    Mutant(
        "home-check-off",
        "a container of another shim's home is left alone",
        "tasks/recovery.py",
        "        if container.home not in (None, home):\n",
        "        if False:\n",
        (f"{_TASKS}test_step.py::test_a_container_of_another_home_is_left_alone",),
    ),
    Mutant(
        "others-need-it-check-off",
        "a volume or key that another task needs stays",
        "tasks/holdings.py",
        "            if other is not entry and not other.task.released\n",
        "            if False\n",
        (
            f"{_TASKS}test_endings.py::test_two_tasks_with_one_volume_and_key_that_end_at_once_leave_neither",
            _MATRIX,
        ),
    ),
    Mutant(
        "reserve-on-inspect-failure-off",
        "while nobody can tell a task's GPUs, none counts as idle",
        "tasks/restore.py",
        "                self._gpus.doubt(task.id)\n",
        "                pass\n",
        (f"{_TASKS}test_step.py::test_while_the_gpus_of_one_task_are_unknown_none_is_given_out",),
    ),
    Mutant(
        "tombstone-off",
        "a record without a container stays known until its removal",
        "tasks/recovery.py",
        "    restore += [_tombstone(item) for task_id, item in sorted(by_id.items()) if task_id not in mine]\n",
        "",
        (
            f"{_TASKS}test_restarts.py::test_killed_before_there_is_a_container_the_task_is_known_with_its_step",
            _MATRIX,
        ),
    ),
    Mutant(
        "lock-off",
        "one shim on one home",
        "home.py",
        "        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "        pass\n",
        (f"{_SHIM}test_home.py::test_a_second_shim_is_told_who_runs_there",),
    ),
    Mutant(
        "boot-check-off",
        "after a reboot a code 0 that nobody said is no success",
        "tasks/outcomes.py",
        "    return None not in (record.boot_id, boot.id) and record.boot_id != boot.id\n",
        "    return False\n",
        (
            f"{_TASKS}test_restarts.py::test_after_a_reboot_a_zero_of_a_task_that_ran_is_no_success",
        ),
    ),
    Mutant(
        "unreachable-is-dead",
        "only an engine that says so has no container: no answer ends no task",
        "tasks/step.py",
        """        except ContainerNotFound:
            self._watch.ended(task.container_id, None)
""",
        """        except EngineError:
            self._watch.ended(task.container_id, None)
""",
        (f"{_TASKS}test_step.py::test_when_the_inspect_fails_the_task_is_undecided",),
    ),
    Mutant(
        "last-reason-wins",
        "the first recorded reason stays",
        "tasks/task.py",
        """    record = task.record
    if not task.over:
        record""",
        """    record = task.record
    if reason:
        record""",
        (
            f"{_TASKS}test_endings.py::test_a_terminate_while_the_answer_of_a_create_is_lost_finds_the_container",
        ),
    ),
    Mutant(
        "grace-forgotten",
        "what is left of a grace is kept across a restart",
        "tasks/outcomes.py",
        "        in_grace = task.record.stop_by is not None and now < task.record.stop_by\n",
        "        in_grace = False\n",
        (f"{_TASKS}test_restarts.py::test_a_grace_that_has_not_run_out_is_kept_across_a_restart",),
    ),
    Mutant(
        "old-list-believed",
        "the step leaves a task alone that moved since it asked for the list",
        "tasks/step.py",
        "            return not entry.busy and entry.changed_at <= seen_at and has_work(entry)\n",
        "            return not entry.busy and has_work(entry)\n",
        (f"{_TASKS}test_step.py::test_a_container_that_an_old_list_shows_as_not_started_runs_on",),
    ),
    Mutant(
        "start-not-waited-for",
        "a terminate waits for the start that is in flight",
        "tasks/finish.py",
        "                await entry.start_done.wait()\n            if not",
        "            if not",
        (
            f"{_TASKS}test_endings.py::test_a_terminate_that_lands_in_a_start_waits_for_it_and_leaves_nothing",
        ),
    ),
    Mutant(
        "release-before-stop",
        "released only once the container cannot be running",
        "tasks/finish.py",
        """                await self._stop(entry, self._grace(entry.task, timeout))
                await self._ended(entry, "", "")
                await self._holdings.release(entry)
""",
        """                await self._holdings.release(entry)
                await self._stop(entry, self._grace(entry.task, timeout))
                await self._ended(entry, "", "")
""",
        (f"{_TASKS}test_endings.py::test_what_cannot_be_released_is_told_and_tried_again",),
    ),
    Mutant(
        "unlock-before-record",
        "a GPU is idle again only once that is on disk",
        "tasks/holdings.py",
        """            await self._book.change(entry, released)
            self._gpus.release(entry.task.id)
""",
        """            self._gpus.release(entry.task.id)
            await self._book.change(entry, released)
""",
        (f"{_TASKS}test_endings.py::test_a_gpu_is_idle_again_only_once_that_is_on_disk",),
    ),
    Mutant(
        "late-start-at-any-age",
        "a container that never started is started only within a minute of its creation",
        "tasks/outcomes.py",
        "    return intent.handover or now - container.created < FRESH\n",
        "    return True\n",
        (
            f"{_TASKS}test_restarts.py::test_killed_long_before_a_container_was_started_the_task_fails_and_holds_nothing",
            _MATRIX,
        ),
    ),
    Mutant(
        "forged-record-believed",
        "a record that the job could write is believed as far as container and host confirm it",
        "tasks/recovery.py",
        "    if writable_by_job or mounted != found.name:\n",
        "    if False:\n",
        (
            f"{_TASKS}test_recovery.py::test_a_record_the_job_could_write_is_believed_only_as_far_as_the_host_confirms_it",
        ),
    ),
    Mutant(
        "damage-not-set-aside",
        "a damaged record is kept under another name",
        "tasks/restore.py",
        "                name = await self._blocking(self._records.set_aside, item.dir)\n",
        "                name = item.dir\n",
        (
            f"{_TASKS}test_restarts.py::test_a_damaged_record_is_set_aside_and_its_container_runs_on_with_its_gpus",
            _MATRIX,
        ),
    ),
    Mutant(
        "newer-record-overwritten",
        "a record for a newer reader is never written over",
        "tasks/recovery.py",
        "        saving = Saving.HANDS_OFF\n",
        "        pass\n",
        (
            f"{_TASKS}test_restarts.py::test_a_record_of_a_newer_shim_is_never_written_over",
            _MATRIX,
        ),
    ),
    Mutant(
        "scan-not-certain",
        "what a start has read is certain to survive a power cut",
        "store.py",
        "                self._make_certain(self._runners / name)\n",
        "                pass\n",
        (
            f"{_SHIM}test_store_certainty.py::test_a_scan_flushes_what_a_crash_may_have_left_unflushed",
        ),
    ),
    Mutant(
        "failed-submit-leaves-something",
        "a submit that is refused leaves nothing",
        "store.py",
        "                self._delete(self._runners / dir)\n                raise\n",
        "                raise\n",
        (
            f"{_SHIM}test_store.py::test_a_task_that_could_not_be_made_durable_leaves_no_half_made_directory",
        ),
    ),
    Mutant(
        "late-create-not-adopted",
        "a container that came true after its create's answer was lost is found",
        "tasks/step.py",
        "        if not self._strangers(listed, seen_at):\n",
        "        if True:\n",
        (f"{_TASKS}test_step.py::test_a_container_nobody_knows_is_adopted_and_finishes",),
    ),
)
