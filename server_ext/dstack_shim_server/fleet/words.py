"""How the command line puts things: ages, tables, and a decision in sentences."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from dstack_shim_server.fleet.reading import Instance
from dstack_shim_server.journal import printable

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))
_SHOWN = 48


def age(seconds: float) -> str:
    """Put a duration in its largest unit that makes sense."""
    if seconds < 0:
        return "in the future"
    for size, unit in _UNITS:
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def moment(at: float) -> str:
    """Put an instant as people write it, in UTC."""
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ")


def fleet_name(row: Mapping[str, Any]) -> str:
    """Name a fleet with its project, as far as both are known."""
    return "/".join(filter(None, (row.get("project"), row.get("fleet")))) or "-"


def waiting_for(instance: Instance) -> str:
    """Say in few words what an instance is waiting for."""
    if instance.state == "current":
        return ""
    tasks = ", ".join(f"{count} {status}" for status, count in sorted(instance.blocking.items()))
    if tasks:
        return tasks
    return str(instance.row["reason"]).removeprefix("not now: ").removeprefix("not safe: ")


def instance_cells(instance: Instance) -> Sequence[str]:
    """Make the cells of an instance in the table of all."""
    row = instance.row
    features = instance.document()["features"]
    return [
        row["name"],
        fleet_name(row),
        row["running_version"] or "-",
        row["wanted_version"] or row["installed_version"] or "-",
        "-" if features is None else " ".join(features) or "none",
        instance.state,
        age(instance.now - row["seen_at"]),
        waiting_for(instance),
    ]


def restart_cells(restart: Mapping[str, Any]) -> Sequence[str]:
    """Make the cells of a restart in the table of all."""
    absence = restart["absence"]
    return [
        moment(restart["requested_at"]),
        restart["instance"],
        restart["from"],
        restart["to"],
        restart["outcome"] or "under way",
        "-" if absence is None else age(absence),
        str(len(restart["tasks_before"])),
        restart["why"],
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    """
    Align cells under their heads, one line each.

    By hand: a table of rich's takes three seconds for 5,000 rows, this takes none.
    """
    lines = [head, *([printable(cell) for cell in row] for row in rows)]
    shown = [[*(cut(cell) for cell in line[:-1]), line[-1]] for line in lines]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for line in shown:
        yield "  ".join(map(str.ljust, line, widths)).rstrip()


def cut(cell: str) -> str:
    """Keep a cell from pushing all others away."""
    return cell if len(cell) <= _SHOWN else f"{cell[: _SHOWN - 1]}…"


def why(
    instance: Instance, restarts: Sequence[Mapping[str, Any]], rollout: Sequence[str]
) -> Iterable[str]:
    """Tell an instance's decision in sentences, with ids and ages."""
    row, now = instance.row, instance.now
    yield (
        f"Instance {row['name']} ({row['id']}) of fleet {fleet_name(row)} was last checked "
        f"{age(now - row['seen_at'])} ago and is {instance.state}."
    )
    yield _versions(instance)
    if instance.under_way:
        yield f"A restart was requested {age(now - restarts[0]['requested_at'])} ago."
    elif row["reason"] and instance.state not in {"current", "to install"}:
        yield f"For {age(now - row['reason_since'])} the answer has been: {row['reason']}."
    yield from _tasks(instance)
    yield from rollout
    if restarts:
        yield _last_restart(restarts[0], now)


def _versions(instance: Instance) -> str:
    row = instance.row
    features = instance.document()["features"]
    told = "tells no features" if features is None else f"has {', '.join(features) or 'none'}"
    installed = row["installed_version"] or "nothing that is known"
    wanted = f", {row['wanted_version']} is wanted" if row["wanted_version"] else ""
    running = row["running_version"] or "something unknown"
    return f"It runs {running} ({told}) and has {installed} installed{wanted}."


def _tasks(instance: Instance) -> Iterable[str]:
    tasks = instance.document()["tasks"]
    if tasks is None:
        yield "Its tasks were not seen in that check."
        return
    alive = [(task_id, status) for task_id, status in tasks if status != "terminated"]
    if not alive:
        yield "It has no task alive."
    for task_id, status in alive:
        in_the_way = " and in the way" if status in instance.blocking else ""
        yield f"Task {printable(task_id)} is {status}{in_the_way}."


def _last_restart(restart: Mapping[str, Any], now: float) -> str:
    outcome = restart["outcome"] or "under way"
    absent = "" if restart["absence"] is None else f", absent for {age(restart['absence'])}"
    return (
        f"Its last restart, from {restart['from']} to {restart['to']} "
        f"{age(now - restart['requested_at'])} ago: {outcome}{absent}"
        + (f": {printable(restart['why'])}." if restart["why"] else ".")
    )
