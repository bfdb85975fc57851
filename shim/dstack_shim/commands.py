"""What the file can do besides being the daemon: one table of commands and their options.

The command line is read by it, and help, completion and man page are written from it. It is data
only: the daemon, which reads its own flags by it too, imports nothing for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen
class Option:
    """An option of commands: its names, the longest first, and what stands for its value.

    ``value`` is "" for a switch, which takes none. An option of one name means the same in
    every command that has it.
    """

    names: tuple[str, ...]
    help: str
    value: str = ""

    @property
    def name(self) -> str:
        """The name it is known by."""
        return self.names[0]


@attrs.frozen
class Command:
    """One command. ``argument`` is what follows it, in brackets if it may be missing, "" for none.

    ``text`` are paragraphs; ``exits`` are exit codes of its own, besides 0 and 2 for a wrong
    command line.
    """

    name: str
    summary: str
    text: tuple[str, ...]
    argument: str = ""
    options: tuple[Option, ...] = ()
    exits: Mapping[int, str] = attrs.field(factory=dict)

    @property
    def most_arguments(self) -> int:
        """How many words may follow."""
        return 1 if self.argument else 0

    @property
    def fewest_arguments(self) -> int:
        """How many words must follow."""
        return 1 if self.argument and not self.argument.startswith("[") else 0


JSON = Option(("json",), "print JSON, for programs")
FOLLOW = Option(("follow", "f"), "go on with what is added, until interrupted")
LINES = Option(("lines", "n"), "how many of the last ones, or all", "NUMBER")
QUIET = Option(("quiet", "q"), "print ids only, one a line")
RAW = Option(("raw",), "the bytes as they are; not to a terminal")
TIMES = Option(("timestamps", "t"), "begin each line with its time")

FIX = Option(("fix",), "offer to mend what is ours, asking before each")
BUNDLE = Option(("bundle",), "write an archive for support, without secrets", "FILE")

FAILED, NOT_RUNNING, UNKNOWN_TASK = 1, 3, 4
"""Exit codes of commands. 3 and 4 mean to systemctl what they mean here."""
WRONG_USE = 2
"""Exit code of a command asked wrongly."""

_NO_HOME = {FAILED: "the home cannot be read"}
_NO_TASK = {UNKNOWN_TASK: "no task, or more than one, goes by that id"}
_ID = ("ID is a task's id, the beginning of one, or a task's name; it has to fit one task only.",)

DOCTOR = Command(
    "doctor",
    "tell what is wrong on this host and what to do",
    (
        (
            "Looks at home, lock, shim, engine, runner, disks, records, containers, GPUs, volumes and "
            "keys; each line is ok, a warning, or broken, and says what to do. Then it tells what a "
            "start on this home would do with every task. It changes nothing."
        ),
        (
            "--fix offers to mend what is this shim's beyond doubt, one thing after the other, and "
            "asks before each. It needs the shim stopped: one that runs mends itself."
        ),
        (
            "--bundle writes an archive for those who help: what is told here, records, containers "
            "and the log, without keys, environments and output of jobs."
        ),
    ),
    options=(JSON, FIX, BUNDLE),
    exits={
        1: "there is a warning, or --fix or --bundle could not be done",
        2: "something is broken or cannot be told, or it was asked wrongly",
    },
)
PS = Command(
    "ps",
    "list the tasks of this host",
    (
        (
            "One line a task: its status and since when, image, number of GPUs, host ports, and how "
            "it ended or how far its pull is. What is not known yet is a dash."
        ),
        (
            "On a terminal the table fits its width and ids are cut to what tells them apart; "
            "anywhere else nothing is cut. Without a shim it tells what records and containers say; "
            "without an engine, what the records say."
        ),
    ),
    options=(JSON, QUIET),
    exits=_NO_HOME,
)
SHOW = Command(
    "show",
    "tell everything about one task",
    (
        *_ID,
        (
            "What was asked, what the record holds, and what the container says. Credentials and "
            "key material are in neither."
        ),
    ),
    argument="ID",
    options=(JSON,),
    exits={**_NO_HOME, **_NO_TASK},
)
LOGS = Command(
    "logs",
    "print the output of a task's container",
    (
        *_ID,
        (
            "Both streams, the last 200 lines unless told otherwise. Colours are taken out, and what "
            "could steer a terminal is shown as an escape; --raw gives the bytes, for files."
        ),
        (
            "The output is the engine's: without an engine, or once the container is removed, only "
            "the last words in the record are left, if there are any."
        ),
    ),
    argument="ID",
    options=(FOLLOW, LINES, TIMES, RAW, JSON),
    exits={FAILED: "the output is not to be had; standard error says why", **_NO_TASK},
)
EVENTS = Command(
    "events",
    "tell what the shim did, from its log",
    (
        (
            "The last 100 events of shim.log, oldest first; with ID only those of one task, also of "
            "one that was removed since. ID is a task's id or the beginning of one."
        ),
        "Only the last 8 MB of the log are looked at, unless --lines is all.",
    ),
    argument="[ID]",
    options=(FOLLOW, LINES, JSON),
    exits={FAILED: "the log cannot be read", UNKNOWN_TASK: "the log has no event of such a task"},
)
STATUS = Command(
    "status",
    "tell how the shim is",
    (
        (
            "Whether a shim answers, which one, since when, what it promises, how its last upgrade "
            "went, the health of the GPUs, the engine, and the tasks by status."
        ),
    ),
    options=(JSON,),
    exits={**_NO_HOME, NOT_RUNNING: "no shim answers"},
)
CHECK = Command(
    "check",
    "report to a running shim, before an upgrade",
    (
        (
            "Asked by a shim, with its own flags, of a file that is to take over from it. Changes "
            "nothing; the report is JSON. People ask doctor."
        ),
    ),
    exits={1: "it cannot tell"},
)
COMPLETION = Command(
    "completion",
    "print what makes a shell complete these commands",
    (
        (
            "SHELL is bash, zsh or fish. For bash: dstack-shim completion bash > "
            "/etc/bash_completion.d/dstack-shim"
        ),
    ),
    argument="SHELL",
)

COMMANDS: Mapping[str, Command] = {
    command.name: command
    for command in (PS, SHOW, LOGS, EVENTS, STATUS, DOCTOR, CHECK, COMPLETION)
}
"""Every command by its name, in the order in which they are told."""

OPTIONS: Mapping[str, Option] = {
    name: option
    for command in COMMANDS.values()
    for option in command.options
    for name in option.names
}
"""Every option by each of its names."""

SHELLS = ("bash", "zsh", "fish")
