"""Writes the report of `bench gpu`."""

from __future__ import annotations

from typing import Any

Report = dict[str, Any]
_KERNELS = 25


def summary(report: Report) -> str:
    """A few lines for the terminal: speed beside what is expected, and the first cause."""
    lines = [_speed(report), *_peers(report)] if "one GPU" in report["rungs"] else []
    if report["fused"] is not None:
        lines.append(_fused(report))
    if report["causes"]:
        first = report["causes"][0]
        lines.append(f"first cause: {first['what']} (some {first['lost']:.1f} ms per step) -> {first['remedy']}")
    elif report["expected"] and not report["error"]:
        lines.append("no cause for a shortfall: the speed is as expected")
    return "\n".join(lines)


def _fused(report: Report) -> str:
    """What --fuse_relu_gradients does on this GPU."""
    if isinstance(report["fused"], str):
        return f"--fuse_relu_gradients does not run on this GPU: {report['fused']}"
    ratio = report["fused"] / report["rungs"]["one GPU"]["images_per_second"]
    return f"with --fuse_relu_gradients {report['fused']:,.1f} images/s: {ratio:.3f} times as fast"


def _speed(report: Report) -> str:
    row = report["rungs"]["one GPU"]
    text = f"{row['model']}, {row['image_size']} px, {row['precision']}, batch {row['batch_per_rank']}: "
    text += f"{row['images_per_second']:,.1f} images/s on one {row['gpu'] or 'CPU'}"
    return text


def _peers(report: Report) -> list[str]:
    """What the speed is judged by, what this program has reached elsewhere, and the limit of the GPU's memory."""
    if not report["expected"]:
        return []
    text = f"published: {report['expected']:,.0f} ({report['expected_from']})"
    reached = ", ".join(f"{s['images_per_second']:,.0f} at batch {s['batch']}" for s in report["reached"])
    text += f"; this program before: {reached}" if reached else ""
    return [text + (f"; limit of the memory: {report['limit']:,.0f}" if report["limit"] else "")]


def markdown(report: Report) -> str:
    """The whole report."""
    lines = ["# GPU report", "", f"{report['date']}, hosts {report['hosts']}, flags `{' '.join(report['flags'])}`", ""]
    if report["error"]:
        lines += [f"**Ended early:** {report['error']}", ""]
    lines += [*summary(report).splitlines(), ""]
    lines += _rungs(report)
    if report["published"]:
        lines += ["## Published", "", "| source | batch | GPUs | images/s of a GPU |", "|---|---:|---:|---:|"]
        lines += [
            f"| {s['source']} | {s['batch']} | {s['gpus']} | {s['images_per_second']:,.0f} |"
            for s in report["published"]
        ]
        lines.append("")
    if report["causes"]:
        lines += ["## Causes, the first to be mended first", ""]
        lines += [
            f"{number}. {c['what']}: some {c['lost']:.1f} ms per step. {c['remedy']}"
            for number, c in enumerate(report["causes"], 1)
        ]
        lines.append("")
    lines += _device(report["rungs"].get("one GPU", {}).get("profile"))
    lines += ["## The doctor", "", "```"]
    lines += [
        f"{f['level']}  {f['check']}: {f['message']}" + (f" -> {f['remedy']}" if f["level"] != "pass" else "")
        for f in report["findings"]
    ]
    lines += ["```", ""]
    described = report["rungs"].get("one GPU", {}).get("described")
    if described:
        lines += ["## Machine", "", *(f"- {name}: {value}" for name, value in described.items()), ""]
    return "\n".join(lines)


def _rungs(report: Report) -> list[str]:
    if not report["rungs"]:
        return []
    lines = [
        "## Speed",
        "",
        "| rung | ranks | step ms | without communication | exposed ms | images/s | of so many alone |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    alone = report["rungs"]["one GPU"]["images_per_second"]
    for name, row in report["rungs"].items():
        share = row["images_per_second"] / (alone * row["ranks"])
        lines.append(
            f"| {name} | {row['ranks']} | {1e3 * row['step_seconds']:.2f} | {1e3 * row['compute_seconds']:.2f} | "
            f"{1e3 * row['exposed_seconds']:.2f} | {row['images_per_second']:,.1f} | {100 * share:.1f} % |"
        )
    lines.append("")
    for name, row in report["rungs"].items():
        lines += [f"- {name}: {row['transport']}"] if "transport" in row else []
        lines += [f"- {name}: clocks were slowed down: {row['slowed']}"] if row.get("slowed") else []
    if report["input_rate"] is not None:
        lines.append(f"- input: a host reads and decodes {report['input_rate']:,.0f} images/s")
    return [*lines, ""]


def _device(profile: Report | None) -> list[str]:
    if not profile:
        return []
    kinds: dict[str, float] = {}
    for kernel in profile["kernels"]:
        kinds[kernel["kind"]] = kinds.get(kernel["kind"], 0.0) + kernel["milliseconds"]
    lines = [
        "## One GPU under the profiler",
        "",
        f"step {profile['step']:.2f} ms, GPU busy {profile['busy']:.2f} ms, {profile['launches']:.0f} kernels a step; "
        f"normalization in {profile['layout'] or 'an unknown layout'}"
        + ("" if profile["tensor_cores"] is None else f"; {100 * profile['tensor_cores']:.0f} % of the time of "
           "convolutions on tensor cores"),
        "",
        "| kind | ms per step | share |",
        "|---|---:|---:|",
    ]  # fmt: skip
    for kind, value in sorted(kinds.items(), key=lambda pair: -pair[1]):
        lines.append(f"| {kind} | {value:.2f} | {100 * value / profile['step']:.1f} % |")
    lines += ["", f"{profile['fetches']:.1f} copies to the host a step. The longest times in which nothing ran:", ""]
    lines += ["| ms | after | before |", "|---:|---|---|"]
    lines += [
        f"| {g['milliseconds']:.3f} | `{_short(g['before'])}` | `{_short(g['after'])}` |" for g in profile["gaps"]
    ]
    lines += ["", "| kernel | kind | ms per step | launches |", "|---|---|---:|---:|"]
    for kernel in profile["kernels"][:_KERNELS]:
        name, count = _short(kernel["name"]), kernel["launches"]
        lines.append(f"| `{name}` | {kernel['kind']} | {kernel['milliseconds']:.3f} | {count:.1f} |")
    return [*lines, ""]


def _short(name: str) -> str:
    """A kernel's name for a table."""
    return name.replace("|", "/")[:110]
