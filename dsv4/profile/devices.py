"""Devices as the roofline sees them: peaks from `devices.toml` beside this file, whose comments name their sources."""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from dsv4.errors import ConfigError

TABLE = Path(__file__).with_name("devices.toml")


@dataclass(frozen=True, kw_only=True)
class Device:
    """Peaks of one NPU in decimal units. hop_us: latency of a collective; launch_us: gap between two kernels."""

    name: str
    about: str
    memory_gb: float
    bandwidth_gb_s: float
    bf16_tflops: float
    int8_tops: float
    f32_tflops: float
    link_gb_s: float
    hop_us: float
    launch_us: float

    def compute_s(self, flops: dict[str, int]) -> float:
        """Seconds of matrix products, by operand dtype."""
        peaks = {"int8": self.int8_tops, "bf16": self.bf16_tflops, "f32": self.f32_tflops}
        return sum(count / (peaks[dtype] * 1e12) for dtype, count in flops.items())

    def memory_s(self, count: int) -> float:
        return count / (self.bandwidth_gb_s * 1e9)

    def exchange_s(self, count: int) -> float:
        """Seconds of one collective that puts `count` bytes on this rank's link."""
        return self.hop_us * 1e-6 + count / (self.link_gb_s * 1e9)


def load_devices(path: Path = TABLE) -> dict[str, Device]:
    """All devices of a table, by name. Raises ConfigError naming what is missing or unknown."""
    try:
        raw = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no device table there; pass one with --device-table") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    names = {field.name for field in fields(Device)} - {"name"}
    for device, values in raw.items():
        if not isinstance(values, dict) or values.keys() != names:
            wrong = sorted(names ^ set(values)) if isinstance(values, dict) else [device]
            raise ConfigError(
                f"{path}: [{device}]: {', '.join(wrong)}: expected exactly the keys {', '.join(sorted(names))}"
            )
    return {name: Device(name=name, **values) for name, values in raw.items()}
