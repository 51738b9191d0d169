"""The engine flags, once: what an operator may ask for, and everything that can be refused before any weight is read.

Flags and checks are those of the system we re-implement, so that its documented command lines work after changing the
program's name; where it let something slip (a boolean as 0, `7.0` as 7) we do not.
"""

import json
import logging
from dataclasses import dataclass
from typing import Any, Literal

from dsv4.config import ModelConfig, ParallelConfig
from dsv4.errors import ConfigError

log = logging.getLogger("dsv4.engine")

PAGE_TOKENS = 32  # --block-size: source tokens in a raw kv page
MAX_CHUNK = 8192
MAX_THREADS = 1024
GROUP_ROWS = 64  # requests that one TP group can seat
CONTEXT_CEILING = 1_048_576
_SPECULATION = ("method", "num_speculative_tokens", "adaptive")
NPU_LAYOUTS = ((4, 16, 4), (2, 8, 4))  # (dp, ep, tp)


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Flags as given, unchecked; `resolve` checks them against a model. `None` means "not given"."""

    model: str
    served_model_name: str | None = None
    platform: str = "auto"
    target: str = "auto"
    device: int | None = None
    devices: str | None = None
    dp: int = 1
    ep: int = 1
    tp: int = 1
    block_size: int = PAGE_TOKENS
    max_model_len: int = 1024
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 4096
    long_prefill_token_threshold: int = 2048
    max_waiting: int = 1024
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    prefix_replay: int = 1
    speculative_config: str | None = None
    num_speculative_tokens: int | None = None
    npu_memory_utilization: float = 0.9
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    data_parallel_routing: str = "least_pending_tokens"
    ring_heap: str | None = None
    ring_task_window: str | None = None
    ring_dep_pool: str | None = None
    use_compile_cache: bool = False
    threads: int | None = None
    step_timeout: float = 120.0


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Flags that fit the model. `chunk` is the longest prefill chunk of one request; `k` the draft width, 0 or 7; `adaptive`
    says whether steps that are faster without drafts verify none."""

    args: EngineArgs
    platform: Literal["cpu", "a2a3"]
    parallel: ParallelConfig
    devices: tuple[int, ...]
    k: int
    adaptive: bool
    chunk: int

    @property
    def partitions(self) -> int:
        return self.parallel.dp


def speculation(
    speculative_config: str | None, num_speculative_tokens: int | None, adaptive: bool = False
) -> tuple[int, bool]:
    """K (0 or 7) and whether it is adaptive, from `--speculative-config` or its old alias. Raises ConfigError naming the field.

    adaptive: what it is if nothing is said.
    """
    if speculative_config is None:
        k, name = (0 if num_speculative_tokens is None else num_speculative_tokens), "--num-speculative-tokens"
    else:
        if num_speculative_tokens is not None:
            raise ConfigError("--speculative-config and --num-speculative-tokens exclude each other; use the former")
        name = "--speculative-config: num_speculative_tokens"
        try:
            raw: Any = json.loads(speculative_config)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"--speculative-config: expected a JSON object, got {speculative_config!r} ({error})"
            ) from None
        if not isinstance(raw, dict):
            raise ConfigError(f"--speculative-config: expected a JSON object, got {speculative_config!r}")
        method = raw.get("method")
        if method != "dspark":
            raise ConfigError(f"--speculative-config: method is {method!r}, expected 'dspark'")
        if unknown := raw.keys() - set(_SPECULATION):
            raise ConfigError(
                f"--speculative-config: unknown field {sorted(unknown)[0]!r}; fields are {', '.join(_SPECULATION)}"
            )
        k, adaptive = raw.get("num_speculative_tokens", 0), raw.get("adaptive", adaptive)
        if not isinstance(adaptive, bool):
            raise ConfigError(f"--speculative-config: adaptive is {adaptive!r}, expected true or false")
    if not isinstance(k, int) or isinstance(k, bool) or k not in (0, 7):
        raise ConfigError(
            f"{name} is {k!r}, expected the integer 7 (DSpark drafts seven tokens), or 0 for the target alone"
        )
    return k, adaptive and k > 0


def parse_devices(device: int | None, devices: str | None, ranks: int) -> tuple[int, ...]:
    """Device ids, one per rank. `--devices` wins over `--device`; the default is 0 .. ranks-1 on one machine."""
    if devices is None:
        return (device,) if device is not None else tuple(range(ranks))
    parts = devices.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"--devices: expected ids like 0,1,2,3 without blanks, got {devices!r}")
    ids = tuple(int(part) for part in parts)
    if len(set(ids)) != len(ids):
        raise ConfigError(f"--devices: {devices!r} names a device twice")
    return ids


def _check_ring(name: str, value: str | None) -> None:
    if value is None:
        return
    parts = value.split(",")
    if len(parts) not in (1, 4) or not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"{name}: expected one non-negative integer or four, comma separated, got {value!r}")
    if name == "--ring-heap" and any((n := int(p)) and (n < 1024 or n & (n - 1)) for p in parts):
        raise ConfigError(f"{name}: sizes must be 0 or a power of two of at least 1024, got {value!r}")
    log.warning("%s is accepted and ignored: graph memory comes from the allocator; see --npu-memory-utilization", name)


def _layout(args: EngineArgs, platform: str) -> tuple[ParallelConfig, tuple[int, ...]]:
    given = f"--dp {args.dp} --ep {args.ep} --tp {args.tp}"
    devices = parse_devices(args.device, args.devices, args.ep)
    if platform == "a2a3":
        if args.tp != 4:
            raise ConfigError(f"--tp is {args.tp}, expected 4 on NPUs")
        if args.ep not in (8, 16):
            raise ConfigError(f"--ep is {args.ep}, expected 8 or 16 on NPUs")
        if args.dp != args.ep // 4:
            raise ConfigError(f"--dp is {args.dp}, expected {args.ep // 4} (ep / 4) with --ep {args.ep}")
    elif args.dp * args.tp != args.ep or min(args.dp, args.tp, args.ep) < 1:
        raise ConfigError(f"{given}: expected dp x tp = ep, all at least 1")
    if len(devices) != args.ep:
        raise ConfigError(f"{given}: expected {args.ep} device ids, one per rank, got {len(devices)}; use --devices")
    return ParallelConfig(dp=args.dp, tp=args.tp, ep=args.ep), devices


def check_drafter(cfg: ModelConfig) -> None:
    """K = 7 needs a DSpark checkpoint; each failure names the field, its value and what is needed."""
    last = tuple(range(cfg.num_hidden_layers - cfg.num_stages, cfg.num_hidden_layers))
    if cfg.num_stages != 3 or not cfg.has_dspark:
        raise ConfigError(
            f"K=7 needs three draft stages: compress_ratios has {cfg.num_stages} entries past num_hidden_layers and "
            f"dspark_target_layer_ids is {list(cfg.dspark_target_layer_ids)}; serve this checkpoint with K=0"
        )
    if cfg.dspark_target_layer_ids != last:
        raise ConfigError(
            f"dspark_target_layer_ids is {list(cfg.dspark_target_layer_ids)}, expected the last layers {list(last)}"
        )
    noise = cfg.dspark_noise_token_id
    if noise is None or not 0 <= noise < cfg.vocab_size:
        raise ConfigError(f"dspark_noise_token_id is {noise}, expected an id below vocab_size {cfg.vocab_size}")
    if not cfg.dspark_markov_rank or cfg.dspark_markov_rank < 1:
        raise ConfigError(f"dspark_markov_rank is {cfg.dspark_markov_rank}, expected a positive rank")


def resolve(args: EngineArgs, cfg: ModelConfig, platform: Literal["cpu", "a2a3"]) -> EngineSettings:
    """Checks every flag, in the order of the original, and returns what they amount to. Raises ConfigError."""
    k, adaptive = speculation(args.speculative_config, args.num_speculative_tokens, adaptive=platform == "cpu")
    parallel, devices = _layout(args, platform)
    parallel.validate(cfg)
    if args.block_size != PAGE_TOKENS:
        raise ConfigError(
            f"--block-size is {args.block_size}, expected {PAGE_TOKENS}: DSpark's kv pages hold 32 tokens"
        )
    most = GROUP_ROWS * parallel.dp
    if not 1 <= args.max_num_seqs <= most:
        raise ConfigError(f"--max-num-seqs is {args.max_num_seqs}, expected 1..{most} ({GROUP_ROWS} per TP group)")
    ceiling = min(cfg.max_position_embeddings, CONTEXT_CEILING)
    if not 2 <= args.max_model_len <= ceiling:
        raise ConfigError(f"--max-model-len is {args.max_model_len}, expected 2..{ceiling} for this checkpoint")
    for flag, value, choices in (
        ("--dtype", args.dtype, ("auto", "bfloat16", "float32")),
        ("--kv-cache-dtype", args.kv_cache_dtype, ("auto", "bfloat16")),
        ("--data-parallel-routing", args.data_parallel_routing, ("least_pending_tokens",)),
    ):
        if value not in choices:
            raise ConfigError(f"{flag} is {value!r}, expected one of {', '.join(choices)}")
    if args.dtype == "float32" and args.kv_cache_dtype == "bfloat16":
        raise ConfigError(
            "--kv-cache-dtype is 'bfloat16' with --dtype float32: the cache follows the dtype, leave it out"
        )
    if args.long_prefill_token_threshold < 0:
        raise ConfigError(f"--long-prefill-token-threshold is {args.long_prefill_token_threshold}, expected 0 or more")
    if args.max_num_batched_tokens < k + 1:
        raise ConfigError(
            f"--max-num-batched-tokens is {args.max_num_batched_tokens}, expected at least {k + 1} (K + 1)"
        )
    bounds = [MAX_CHUNK, args.max_num_batched_tokens]
    if args.enable_chunked_prefill and args.long_prefill_token_threshold:
        bounds.append(args.long_prefill_token_threshold)
    if args.prefix_replay not in (1, 128):
        raise ConfigError(
            f"--prefix-replay is {args.prefix_replay}, expected 1 (hits from 129 tokens) or 128 (from 256)"
        )
    if not 0 < args.npu_memory_utilization <= 1:
        raise ConfigError(f"--npu-memory-utilization is {args.npu_memory_utilization}, expected a share in (0, 1]")
    if not args.step_timeout > 0:
        raise ConfigError(f"--step-timeout is {args.step_timeout}, expected seconds above 0")
    if args.max_waiting < 1:
        raise ConfigError(f"--max-waiting is {args.max_waiting}, expected at least 1")
    if args.threads is not None and not 1 <= args.threads <= MAX_THREADS:
        raise ConfigError(f"--threads is {args.threads}, expected 1..{MAX_THREADS}, best the cores of one rank")
    for name in ("ring_heap", "ring_task_window", "ring_dep_pool"):
        _check_ring("--" + name.replace("_", "-"), getattr(args, name))
    if k:
        check_drafter(cfg)
    return EngineSettings(
        args=args, platform=platform, parallel=parallel, devices=devices, k=k, adaptive=adaptive,
        chunk=max(1, min(bounds)),
    )  # fmt: skip
