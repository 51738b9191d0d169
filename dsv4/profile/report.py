"""A profile as a page, as a trace for Perfetto, and as lines for a terminal. All three read only the JSON data."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dsv4.profile.charts import bars, lines
from dsv4.profile.cost import UNEXPLAINED

GIB = 2**30
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; max-width: 980px; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; } svg { width: 100%; height: auto; font-size: 12px; } .bad { color: #b00; }
"""


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = "".join(f"<th>{escape(str(name))}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def largest(data: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    """The program of a kind with most tokens and pages."""
    found = [p for p in data["programs"] if p["kind"] == kind]
    return max(found, key=lambda p: (p["rows"] * p["query_len"], p["pages"]), default=None)


def _program_row(p: Mapping[str, Any]) -> tuple[str, ...]:
    total, times = p["cost"], p["time_ms"]
    tflop = sum(total["flops"].values()) / 1e12
    return (
        p["shape"], f"{times['total']:.2f}", f"{times['roofline']:.2f}", f"{times['exchange']:.2f}", f"{times['launch']:.2f}",
        f"{tflop:.2f}", f"{total['bytes'].get('weights', 0) / 1e9:.2f}", f"{total['bytes'].get('cache', 0) / 1e9:.2f}",
        f"{total['bytes'].get('activations', 0) / 1e9:.2f}", f"{total['exchanged_bytes'] / 1e6:.0f}",
        f"{p['graph']['nodes']:,}" if p["graph"] else "",
    )  # fmt: skip


_PROGRAM_HEAD = (
    "program",
    "ms",
    "kernels",
    "links",
    "gaps",
    "TFLOP",
    "weights GB",
    "cache GB",
    "other GB",
    "sent MB",
    "nodes",
)


def page(data: Mapping[str, Any]) -> str:
    """A self-contained HTML page."""
    p, memory = data["parallel"], data["memory"]
    title = f"dsv4 profile: dp {p['dp']} x tp {p['tp']} = ep {p['ep']}, K={data['k']}, {data['context']:,} tokens"
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(data['device']['about'])}; {data['requests_per_group']} requests "
             f"per TP group. Predicted from shapes: nothing was run. Lowering: {escape(data['lowering'])}.</p>"]  # fmt: skip
    verdict = "fits" if memory["fits"] else "does <b class='bad'>not</b> fit"
    parts.append(
        f"<h2>Memory of a rank</h2><p>{memory['total_bytes'] / GIB:.1f} of {memory['available_bytes'] / GIB:.1f} GiB: "
        f"{verdict}. Largest context {memory['largest_context']['tokens']:,} tokens "
        f"({escape(memory['largest_context']['bound'])}); largest batch {memory['largest_batch']['requests_per_group']} "
        f"requests per group ({escape(memory['largest_batch']['bound'])}).</p>"
    )
    parts.append(bars({name: size / GIB for name, size in memory["families"].items() if size}, "GiB"))
    parts.append("<h2>Programs</h2>" + _table(_PROGRAM_HEAD, [_program_row(x) for x in data["programs"]]))
    for kind in ("speculate", "decode", "prefill"):
        program = largest(data, kind)
        if program is None:
            continue
        parts.append(f"<h2>Time of {escape(program['shape'])} by part</h2>")
        parts.append(bars(dict(list(program["time_ms"]["by_part"].items())[:12]), "ms", 3))
        if program["graph"]:
            graph = program["graph"]
            per = ", ".join(f"{kind} {n}" for kind, n in graph["nodes_per_layer"].items())
            parts.append(f"<p>{graph['nodes']:,} graph-engine nodes; per layer: {per}.</p>")
            parts.append(bars(dict(list(graph["by_type"].items())[:14]), "nodes", 0))
        moved = [(c["where"], f"{c['bytes'] / 1e9:.2f} GB") for c in program["copies"]]
        share = f"{program['unexplained_share']:.0%}"
        parts.append(
            f"<p>{share} of its bytes are neither weights nor cache; the largest:</p>"
            + _table(("where", "bytes"), moved)
        )
    for s in data["speculation"][-1:]:
        series = {
            "K=7": [(float(n), v) for n, v in s["tokens_per_s"].items()],
            "K=0": [(1.0, s["plain_tokens_per_s"]), (8.0, s["plain_tokens_per_s"])],
        }
        parts.append(f"<h2>When drafting pays ({s['requests']} requests per group)</h2>")
        marks = [(s["break_even"], f"break-even {s['break_even']:.2f}")]
        parts.append(lines(series, "mean accepted length (tokens per verify step)", "tokens/s per group", marks))
    return f"<!doctype html><meta charset='utf-8'><title>{escape(title)}</title><style>{_STYLE}</style>" + "\n".join(
        parts
    )


def trace(data: Mapping[str, Any]) -> str:
    """Chrome / Perfetto trace: one row a program, one slice a part, in the order of the report."""
    events = []
    for row, program in enumerate(data["programs"]):
        events.append({"ph": "M", "pid": 1, "tid": row, "name": "thread_name", "args": {"name": program["shape"]}})
        at = 0.0
        for name, ms in program["time_ms"]["by_part"].items():
            events.append(
                {"ph": "X", "pid": 1, "tid": row, "name": name, "ts": at, "dur": ms * 1e3, "cat": program["kind"]}
            )
            at += ms * 1e3
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _beyond(program: Mapping[str, Any]) -> list[str]:
    """What a program moves besides weights and cache, if that is more than a tenth: its largest movers."""
    if program["unexplained_share"] <= UNEXPLAINED:
        return []
    largest = ", ".join(f"{c['where']} {c['bytes'] / 1e9:.2f} GB" for c in program["copies"][:3])
    return [f"            {program['unexplained_share']:.0%} of its bytes are intermediates: {largest}, ..."]


def summary(data: Mapping[str, Any]) -> list[str]:
    """A dozen lines for a terminal."""
    memory, counts = data["memory"], data["parameters"]
    out = [
        f"parameters  {counts['target'] / 1e9:.0f}B ({counts['active'] / 1e9:.0f}B active), drafter {counts.get('drafter', 0) / 1e9:.0f}B",
        f"memory      {memory['total_bytes'] / GIB:.1f} of {memory['available_bytes'] / GIB:.1f} GiB a rank"
        + ("" if memory["fits"] else ": DOES NOT FIT"),
        f"limits      {memory['largest_context']['tokens']:,} tokens ({memory['largest_context']['bound']}), "
        f"{memory['largest_batch']['requests_per_group']} requests a group ({memory['largest_batch']['bound']})",
    ]  # fmt: skip
    for kind in ("prefill", "decode", "speculate", "seed"):
        program = largest(data, kind)
        if program is None:
            continue
        nodes = f", {program['graph']['nodes']:,} graph nodes" if program["graph"] else ""
        out.append(f"{kind:<11} {program['time_ms']['total']:.1f} ms for {program['shape']}{nodes}")
        out += _beyond(program)
    for s in data["speculation"][-1:]:
        out.append(
            f"K=7 pays    from {s['break_even']:.2f} accepted tokens a step on ({s['requests']} requests a group)"
        )
    out.append(f"lowering    {data['lowering']}")
    return out
