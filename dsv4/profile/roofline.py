"""From costs to time: each operator takes the longer of its arithmetic and its bytes, plus a gap; collectives take their link."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from dsv4.profile.cost import Cost, ProgramCost
from dsv4.profile.devices import Device


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one program. roofline: kernels alone; exchange: links; launch: gaps between kernels."""

    roofline: float
    exchange: float
    launch: float
    by_part: Mapping[str, float]

    @property
    def total(self) -> float:
        return self.roofline + self.exchange + self.launch


def scope_time(cost: Cost, device: Device) -> tuple[float, float, float]:
    """(roofline, exchange, launch) seconds of operators of one kind in one place."""
    kernels = max(device.compute_s(cost.flops), device.memory_s(cost.moved))
    exchange = cost.collectives * device.hop_us * 1e-6 + cost.exchanged / (device.link_gb_s * 1e9)
    return kernels, exchange, cost.nodes * device.launch_us * 1e-6


def step_time(cost: ProgramCost, device: Device) -> StepTime:
    """The program's time, by part. Operators do not overlap in this model."""
    roofline = exchange = launch = 0.0
    parts: dict[str, float] = defaultdict(float)
    for (_, part, _), one in cost.by_scope.items():
        times = scope_time(one, device)
        roofline, exchange, launch = roofline + times[0], exchange + times[1], launch + times[2]
        parts[part] += sum(times)
    return StepTime(
        roofline=roofline, exchange=exchange, launch=launch, by_part=dict(sorted(parts.items(), key=lambda kv: -kv[1]))
    )


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """K = 7 against K = 0 at the same number of requests. break_even: accepted length from which drafting pays."""

    requests: int
    plain_s: float
    speculate_s: float

    @property
    def break_even(self) -> float:
        return self.speculate_s / self.plain_s

    def tokens_per_s(self, length: float) -> float:
        return self.requests * length / self.speculate_s

    @property
    def plain_tokens_per_s(self) -> float:
        return self.requests / self.plain_s
