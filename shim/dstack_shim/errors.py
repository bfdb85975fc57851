"""Every error the shim raises on purpose.

::

    ShimError                       base of all below; str() is fit for a user's eyes
     ├─ UsageError                  command line or environment is wrong           → exit 1
     ├─ StartupError                the daemon cannot start here                   → exit 1
     │   └─ HomeLocked              another shim holds this home                   → exit 1
     ├─ TaskError
     │   ├─ TaskExists              the id was submitted before                    → 409
     │   ├─ TaskNotFound            no task has this id                            → 404
     │   ├─ TaskNotTerminated       remove before terminate                        → 409
     │   └─ IllegalTransition       a change would move a task backwards           → 409
     ├─ ShuttingDown                the daemon accepts no new work                 → 503
     ├─ ShutdownUnsafe              asked to be refused if tasks do not survive    → 409, JSON
     ├─ StoreError                  a record could not be written or read          → 500
     ├─ ResourceError               a GPU, volume, key or mount could not be had   → 500
     │   └─ NoCapacity              not enough idle GPUs
     ├─ CommandError                an external command could not be run
     │   ├─ CommandMissing          the program is not there or cannot be executed
     │   └─ CommandTimedOut         it took too long and was killed
     ├─ ComponentError              a component could not be installed
     │   ├─ InstallRefused          empty or unknown name, empty url               → 400
     │   └─ InstallInProgress       the same component is being installed          → 409
     ├─ UpgradeRefused              a file would not do as our successor; we go on
     ├─ MetricsError                a task's GPU metrics are not to be had
     │   ├─ NoExporter              no dcgm-exporter runs on this host             → 404
     │   └─ ExporterFailed          it gave no answer                              → 502
     └─ EngineError                 the Docker Engine refused or failed            → 500
         ├─ EngineUnreachable       no answer: says nothing about any container
         ├─ ContainerNotFound       the engine answered: there is none
         ├─ NameConflict            create: the name belongs to another container
         ├─ ImageNotFound           create: the image is not here
         ├─ StartFailed             start: the engine could not run the command
         ├─ PullFailed              pull: with the registry's or disk's own words
         └─ PullCancelled           pull: stopped because the task ended

The API turns them into statuses in one place (``api/errors.py``).
"""

from __future__ import annotations

from dstack_shim_contracts.api import ShutdownRefusal


class ShimError(Exception):
    """Base of every error raised on purpose; its text is fit for a user's eyes."""


class UsageError(ShimError):
    """A flag or an environment variable is wrong: fix it and start again."""


class StartupError(ShimError):
    """The daemon cannot start on this host as it is; the text says what to mend."""


class HomeLocked(StartupError):
    """Another shim runs on this home: stop it first, or give another ``--shim-home``."""


class TaskError(ShimError):
    """A request about one task cannot be carried out."""


class TaskExists(TaskError):
    """The id was submitted before and not removed yet."""


class TaskNotFound(TaskError):
    """No task has this id."""


class TaskNotTerminated(TaskError):
    """The task must be terminated before it can be removed."""


class IllegalTransition(TaskError):
    """The change would move the task backwards; nothing was changed."""


class ShuttingDown(ShimError):
    """The daemon is going away and accepts no new work: ask its successor."""


class ShutdownUnsafe(ShimError):
    """A shutdown that is to happen only if it is safe is not; ``refusal`` lists why."""

    def __init__(self, refusal: ShutdownRefusal) -> None:
        super().__init__(", ".join(item.why for item in refusal.in_the_way))
        self.refusal = refusal


class StoreError(ShimError):
    """The disk refused a record: nothing that depended on it was done."""


class ResourceError(ShimError):
    """A GPU, volume, key or mount could not be acquired or released; the text says which."""


class NoCapacity(ResourceError):
    """Fewer idle GPUs than the task asked for."""


class CommandError(ShimError):
    """An external command could not be run (a non-zero exit is a result, not this)."""


class CommandMissing(CommandError):
    """The program is not on this host, or is there and cannot be executed."""


class CommandTimedOut(CommandError):
    """The program took longer than it was given; it and its children were killed."""


class ComponentError(ShimError):
    """A component could not be installed; the one in place is untouched."""


class InstallRefused(ComponentError):
    """The install request names no component we know, or no url."""


class InstallInProgress(ComponentError):
    """The same component is being installed: ask again when it is done."""


class UpgradeRefused(ShimError):
    """A file will not take over, or has not proved itself; the text says why."""


class MetricsError(ShimError):
    """The GPU metrics of a task are not to be had."""


class NoExporter(MetricsError):
    """No dcgm-exporter runs here: not an NVIDIA host, or the program is not installed."""


class ExporterFailed(MetricsError):
    """The dcgm-exporter gave no answer; it may be starting: ask again."""


class EngineError(ShimError):
    """The Docker Engine answered with a refusal or a failure."""


class EngineUnreachable(EngineError):
    """The engine gave no answer. Unreachable is not dead: conclude nothing about containers."""


class ContainerNotFound(EngineError):
    """The engine answered that it has no such container."""


class NameConflict(EngineError):
    """The name is taken by the container ``container_id`` ("" if the engine did not say)."""

    def __init__(self, message: str, container_id: str = "") -> None:
        super().__init__(message)
        self.container_id = container_id


class ImageNotFound(EngineError):
    """The engine has no such image: pull it first."""


class StartFailed(EngineError):
    """The engine could not run the container's command; the text is the engine's own."""


class PullFailed(EngineError):
    """The image could not be pulled; the text is the registry's or the disk's own."""


class PullCancelled(EngineError):
    """The pull was stopped because its task ended."""
