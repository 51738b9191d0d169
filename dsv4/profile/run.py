"""The profile of one deployment: every program captured and costed, memory planned, times predicted, graphs lowered."""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsv4.checkpoint.manifest import weights
from dsv4.config import ModelConfig, ParallelConfig, StepShape
from dsv4.errors import PlatformError
from dsv4.graph.npu import GeLowered
from dsv4.graph.npu_load import load
from dsv4.graph.stages import Traced
from dsv4.mesh import Mesh
from dsv4.profile.capture import Geometry, capture, prefix, world
from dsv4.profile.cost import UNEXPLAINED, Cost, ProgramCost, peak_workspace, place, program_cost, scaled
from dsv4.profile.devices import Device
from dsv4.profile.memory import MemoryPlan, Plan, plan_memory
from dsv4.profile.roofline import Speculation, step_time

SCHEMA = 1
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to profile. shapes: every program a server would capture; lowered: those to lower to graph-engine graphs."""

    cfg: ModelConfig
    parallel: ParallelConfig
    geometry: Geometry
    shapes: tuple[StepShape, ...]
    lowered: frozenset[StepShape]
    device: Device
    plan: Plan
    context: int
    requests: int
    rows_limit: int
    utilization: float
    each: int | None
    out: Path


def parameter_counts(cfg: ModelConfig) -> dict[str, int]:
    """Parameters of the target, of the drafter, and those one token uses (routed experts by k of E, without embedding)."""
    counts = Counter()
    for weight in weights(cfg):
        if weight.name.endswith("tid2eid"):
            continue
        size = 1
        for n in weight.shape:
            size *= n
        counts["drafter" if weight.is_draft else "target"] += size
        if not weight.is_draft and not weight.name.startswith("embed."):
            share = (cfg.num_experts_per_tok, cfg.n_routed_experts) if ".experts." in weight.name else (1, 1)
            counts["active"] += size * share[0] // share[1]
    return dict(counts)


def _cost_json(cost: Cost) -> dict[str, Any]:
    return {
        "operators": cost.nodes,
        "flops": dict(cost.flops),
        "bytes": dict(cost.bytes),
        "collectives": cost.collectives,
        "exchanged_bytes": cost.exchanged,
    }


def _grouped(cost: ProgramCost, key: Callable[[tuple[str, ...]], str]) -> dict[str, Cost]:
    groups: dict[str, Cost] = defaultdict(Cost)
    for scope, one in cost.by_scope.items():
        groups[key(scope)].add(one)
    return dict(sorted(groups.items(), key=lambda kv: -kv[1].moved))


def copies(cost: ProgramCost, least: int = 8) -> list[dict[str, Any]]:
    """The largest movers of intermediates, which weights and cache do not explain: (part, operator) with bytes. As many as it
    takes to leave under a tenth of all bytes unexplained, and at least `least`."""
    movers = _grouped(cost, lambda scope: f"{scope[1]}: {scope[2]}")
    ranked = sorted(movers.items(), key=lambda kv: -kv[1].bytes["activations"])
    rest, named = cost.total.bytes["activations"], []
    for name, one in ranked:
        if len(named) >= least and rest < UNEXPLAINED * cost.total.moved:
            break
        named.append({"where": name, "bytes": one.bytes["activations"]})
        rest -= one.bytes["activations"]
    return named


def _lower(traced: Traced, captured: tuple[str, ...], whole: tuple[str, ...], path: Path) -> dict[str, Any]:
    """Graph-engine nodes of a program, scaled to all layers by the last layer of each kind."""
    began = time.perf_counter()
    low = GeLowered(traced)
    low.save(path)
    layers: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    for node in low.nodes:
        layer, part = place(node.scope)
        if given := re.search(r"_layers_(\d+)_", node.name) if node.type == "Data" else None:
            layer, part = f"layer {given[1]}", "inputs"
        layers[layer] += 1
        parts[f"{layer}/{part}"] += 1
    marginal = {}
    total = low.node_count
    for kind in dict.fromkeys(whole):
        last = max(i for i, k in enumerate(captured) if k == kind)
        marginal[kind] = layers[f"layer {last}"]
        total += (whole.count(kind) - captured.count(kind)) * marginal[kind]
    biggest = Counter()
    for name, n in parts.items():
        layer, part = name.split("/")
        if layer.startswith("layer "):
            biggest[part] += n
    return {
        "captured_nodes": low.node_count,
        "nodes": total,
        "nodes_per_layer": marginal,
        "by_type": dict(low.histogram().most_common()),
        "by_part": dict(biggest.most_common()),
        "copied_inputs": low.copied_pools(),
        "written_inputs": len(low.written_inputs),
        "collectives": [f"{kind} {group}" for kind, group, _ in low.collectives()],
        "seconds": time.perf_counter() - began,
    }


def npu_missing() -> str | None:
    """Why graphs cannot be lowered here, or None."""
    try:
        load()
    except PlatformError as error:
        return str(error)
    return None


def _program(
    request: Request, cfg: ModelConfig, mesh: Mesh, shape: StepShape, lower: bool
) -> tuple[dict[str, Any], ProgramCost, int]:
    # The baseline of a speculating server: the target alone, without drafts in its state.
    geometry = replace(request.geometry, k=0) if shape.kind == "decode" else request.geometry
    traced = capture(cfg, mesh, shape, geometry, device="npu:0" if lower else "cpu")
    stem = str(shape).replace(" ", "_").translate(str.maketrans("[],", "___")).strip("_")
    traced.save(request.out / "programs" / f"{stem}.txt")
    cost = scaled(program_cost(traced), cfg.kinds, request.cfg.kinds)
    times = step_time(cost, request.device)
    total = cost.total
    explained = total.bytes["weights"] + total.bytes["cache"]
    entry = {
        "shape": str(shape),
        "kind": shape.kind,
        "rows": shape.rows,
        "query_len": shape.query_len,
        "pages": shape.pages,
        "capture_seconds": traced.seconds,
        "captured_operators": traced.node_count,
        "cost": _cost_json(total),
        "by_part": {name: _cost_json(one) for name, one in _grouped(cost, lambda scope: scope[1]).items()},
        "by_layer": {name: _cost_json(one) for name, one in _grouped(cost, lambda scope: scope[0]).items()},
        "unexplained_share": 1 - explained / max(total.moved, 1),
        "copies": copies(cost),
        "workspace_bytes": peak_workspace(traced),
        "time_ms": {
            "total": times.total * 1e3,
            "roofline": times.roofline * 1e3,
            "exchange": times.exchange * 1e3,
            "launch": times.launch * 1e3,
            "by_part": {name: seconds * 1e3 for name, seconds in times.by_part.items()},
        },
        "graph": _lower(traced, cfg.kinds, request.cfg.kinds, request.out / "graphs" / f"{stem}.txt")
        if lower
        else None,
    }
    return entry, cost, entry["workspace_bytes"]


def _memory_json(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "families": dict(plan.families),
        "total_bytes": plan.total,
        "available_bytes": plan.available,
        "fits": plan.fits,
        "largest_context": {"tokens": plan.largest_context[0], "bound": plan.largest_context[1]},
        "largest_batch": {"requests_per_group": plan.largest_batch[0], "bound": plan.largest_batch[1]},
    }


def speculation(programs: Iterable[Mapping[str, Any]]) -> list[Speculation]:
    """K = 7 against K = 0, for every (rows, pages) that has both programs."""
    plain, draft = {}, {}
    for p in programs:
        if p["kind"] in ("decode", "speculate"):
            (plain if p["kind"] == "decode" else draft)[(p["rows"], p["pages"])] = p["time_ms"]["total"] / 1e3
    return [
        Speculation(requests=rows, plain_s=plain[(rows, pages)], speculate_s=draft[(rows, pages)])
        for rows, pages in sorted(plain.keys() & draft.keys())
    ]


def profile(request: Request, progress: Progress) -> dict[str, Any]:
    """The whole profile as JSON-able data. Writes captured programs and graphs under `out`. Raises Dsv4Error."""
    cfg = request.cfg if request.each is None else prefix(request.cfg, request.each)
    missing = npu_missing() if request.lowered else "not asked for"
    programs, workspace = [], 0
    shapes = sorted(request.shapes, key=lambda s: (s.kind, s.rows, s.query_len, s.pages))
    with world(request.parallel) as mesh:
        for done, shape in enumerate(shapes):
            progress(str(shape), done, len(shapes))
            lower = missing is None and shape in request.lowered
            entry, _, peak = _program(request, cfg, mesh, shape, lower)
            programs.append(entry)
            workspace = max(workspace, peak)
        memory = plan_memory(
            request.cfg, mesh, request.plan, context=request.context, requests=request.requests,
            rows_limit=request.rows_limit, drafter=request.geometry.k > 0, workspace=workspace,
            available=int(request.device.memory_gb * 1e9 * request.utilization),
        )  # fmt: skip
    progress("done", len(shapes), len(shapes))
    p = request.parallel
    return {
        "schema": SCHEMA,
        "parallel": {"dp": p.dp, "tp": p.tp, "ep": p.ep},
        "device": {"name": request.device.name, "about": request.device.about},
        "context": request.context,
        "requests_per_group": request.requests,
        "k": request.geometry.k,
        "layers": {
            "kinds": dict(Counter(request.cfg.kinds)),
            "captured": list(cfg.kinds),
            "scaled": request.each is not None,
        },
        "parameters": parameter_counts(request.cfg),
        "memory": _memory_json(memory),
        "programs": programs,
        "speculation": [
            {
                "requests": s.requests,
                "plain_ms": s.plain_s * 1e3,
                "speculate_ms": s.speculate_s * 1e3,
                "break_even": s.break_even,
                "plain_tokens_per_s": s.plain_tokens_per_s,
                "tokens_per_s": {str(n): s.tokens_per_s(n) for n in range(1, 9)},
            }
            for s in speculation(programs)
        ],
        "lowering": missing or "torchair",
    }
