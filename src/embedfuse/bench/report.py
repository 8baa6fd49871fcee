"""Tables from a report: what the JSON of a run says, for people. Nothing here is measured."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from .ratios import by_case, findings, hot_row, ratios, scaling, warning
from .reading import Report, device_time, is_disturbed, phases_of, share_of_copy, time_of, version_of


def show(report: Report, console: Console) -> None:
    """Prints a whole report of either kind."""
    if report["kind"] == "models":
        from .models_report import show_models

        show_models(report, console)
        return
    console.print(heading(report), highlight=False)
    busy = warning(report)
    if busy is not None:
        console.print(busy, highlight=False, style="bold")
    console.print(_providers(report))
    for phase in phases_of(report):
        measured = times(report, phase)
        if measured.row_count:
            console.print(measured)
    for table in (ratios(report), by_case(report)):
        if table is not None and table.row_count:
            console.print(table)
    for line in (*findings(report), *hot_row(report), *scaling(report)):
        console.print(line, highlight=False)
    notes = list(refusals(report))
    if notes:
        console.print("Not measured:", highlight=False)
    for line in notes:
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)


def heading(report: Report) -> str:
    """The machine in two lines."""
    own = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in own["versions"].items())
    driver = f", driver {own['driver']}, CUDA {own['cuda']}" if own.get("cuda") else f", {own['cores']} cores"
    scale = "" if report["scale"] == 1 else f", sizes scaled by {report['scale']:g}"
    return (
        f"{own['processor']}{driver}; {versions}, Python {own['python']}\n"
        f"{version_of(report)}, {own['date']}{scale}; a copy moves "
        f"{report['copy bytes per second'] / 1e9:,.1f} GB/s"
    )


def _providers(report: Report) -> Table:
    table = Table(title="Providers", title_justify="left")
    for column in ("name", "what it is", "version, or why it is not here"):
        table.add_column(column)
    for name, entry in report["providers"].items():
        table.add_row(name, entry["title"], entry["reason"] or entry.get("version", ""))
    return table


def times(report: Report, phase: str) -> Table:
    """One phase: a row for each case and provider."""
    table = Table(title=f"{phase} (milliseconds, medians)", title_justify="left")
    table.add_column("case")
    table.add_column("provider")
    on_gpu = report["machine"]["device"].startswith("cuda")
    columns = ("wall", "quartiles", "host", *(("device", "cold", "launches", "peak MB") if on_gpu else ()), "of copy")
    for column in columns:
        table.add_column(column, justify="right")
    for case in report["cases"]:
        first = True
        for provider, entry in case["providers"].items():
            own = entry.get("phases", {}).get(phase)
            if own is None:
                continue
            cells = [case["name"] if first else "", provider + (" (coarse)" if entry.get("coarse") else "")]
            first = False
            if "wall" not in own:
                table.add_row(*cells, own.get("error", ""))
                continue
            wall = own["wall"]
            mark = "!" if is_disturbed(report, case, phase) else ""
            cells += [mark + _number(wall["median"]), f"{_number(wall['q1'])}-{_number(wall['q3'])}"]
            cells.append(_number(own["host"]["median"]))
            if on_gpu:
                kernels = "device" not in own
                device = device_time(case, provider, phase)
                cells.append(("~" if kernels else "") + _number(device))
                cells.append(_number(time_of(case, provider, phase, "device, cold cache")))
                cells += [str(own.get("launches", "")), _number(own.get("peak bytes", 0) / 1e6)]
            share = share_of_copy(report, case, provider, phase)
            cells.append("" if share is None else f"{share:.0%}")
            table.add_row(*cells)
    if on_gpu:
        table.caption = "~: the sum of its kernels, without the gaps between them; it could not be captured in a graph"
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def refusals(report: Report) -> Iterator[str]:
    """Everything without a speed, and why; each reason once."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for case in report["cases"]:
        for provider, entry in case["providers"].items():
            for key in ("wrong", "unsupported", "error"):
                if entry.get(key):
                    reasons.setdefault((provider, f"{key}: {entry[key]}"), []).append(case["name"])
            for phase, own in entry.get("phases", {}).items():
                if "error" in own:
                    reasons.setdefault((provider, f"{phase}: {own['error']}"), []).append(case["name"])
    for (provider, reason), cases in reasons.items():
        yield f"{provider}: {reason} [{', '.join(cases)}]"
    for entry in report["not run"]:
        yield f"{entry['name']}: {entry['reason']}"
