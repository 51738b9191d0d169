"""Trainable weights under their checkpoint names, and the parameter tree made of them at every step.

The tree is built by `dsv4.params` itself from a `Reader` over this dictionary, so training sees the very declaration that
serving does. With `quantised`, matrices are rounded to the form they will be stored in (FP8 tiles, MXFP4 groups) on the way,
with straight-through gradients, and int8 sites are marked for the op set.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.checkpoint.manifest import GROUP, TILE, Weight, weights
from dsv4.config import ModelConfig
from dsv4.model.rope import rope_tables
from dsv4.params import Params, build_drafter, build_target


@dataclass(frozen=True)
class Int8Site:
    """A float matrix whose input the op set rounds to int8, as W8A8 will."""

    weight: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape


def _hyper_base(cfg: ModelConfig, kind: str, rng: torch.Generator) -> Tensor:
    """Streams are averaged on entry, written evenly, and kept apart: close to an ordinary residual, not symmetric."""
    n = cfg.hc_mult
    pre = math.log(1 / (n - 1)) + 0.3 * torch.randn(n, generator=rng)
    if kind == "hc_head_base":
        return pre
    return torch.cat([pre, 0.5 * torch.randn(n, generator=rng), (3 * torch.eye(n)).flatten()])


def hash_table(cfg: ModelConfig, counts: Tensor, rng: torch.Generator) -> Tensor:
    """Two or more distinct experts per token so that expected loads are equal: frequent tokens first, least loaded first."""
    load = torch.rand(cfg.n_routed_experts, generator=rng).double() * 1e-6
    table = torch.empty(cfg.vocab_size, cfg.num_experts_per_tok, dtype=torch.int64)
    for token in counts.argsort(descending=True, stable=True).tolist():
        chosen = load.argsort()[: cfg.num_experts_per_tok]
        table[token] = chosen[torch.randperm(len(chosen), generator=rng)]
        load[chosen] += float(counts[token]) + 0.1
    return table


def initial(cfg: ModelConfig, weight: Weight, counts: Tensor, rng: torch.Generator) -> Tensor:
    """One weight before training. Outputs of sublayers start small; sinks, gates' biases and `ape` start at zero."""
    kind, shape = weight.kind, weight.shape
    last = kind.rsplit(".", 1)[-1]
    if last == "tid2eid":
        return hash_table(cfg, counts, rng)
    if last.endswith("base"):
        return _hyper_base(cfg, last, rng)
    if last.endswith("scale"):
        return torch.ones(shape)
    if last in ("attn_sink", "bias", "ape"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    gain = {"embed": shape[1] ** 0.5 * 0.5, "head": 0.5, "markov_head.markov_w1": 1.0, "markov_head.markov_w2": 0.02,
            "confidence_head.proj": 0.1, "attn.wo_b": 0.5, "ffn.gate": 1.0}.get(kind, 1.0)  # fmt: skip
    if last.endswith("fn"):
        gain = 0.2
    if last == "w2":
        gain = 0.5
    return torch.randn(shape, generator=rng) * (gain / math.sqrt(shape[1]))


def initial_weights(cfg: ModelConfig, counts: Tensor, seed: int) -> dict[str, Tensor]:
    """Every weight of target and drafter by name; floats are float32."""
    rng = torch.Generator().manual_seed(seed)
    return {weight.name: initial(cfg, weight, counts, rng) for weight in weights(cfg)}


def round_fp8(w: Tensor) -> Tensor:
    """The float32 values of a [rows, cols] matrix after FP8 with power-of-two scales per 128 x 128 tile."""
    rows, cols = w.shape
    padded = torch.nn.functional.pad(w, (0, -cols % TILE, 0, -rows % TILE))
    tiles = padded.view(padded.shape[0] // TILE, TILE, padded.shape[1] // TILE, TILE)
    scale = torch.exp2(torch.ceil(torch.log2(tiles.abs().amax((1, 3), keepdim=True).clamp(min=1e-30) / 448)))
    return ((tiles / scale).to(torch.float8_e4m3fn).float() * scale).view(padded.shape)[:rows, :cols]


def round_mxfp4(w: Tensor) -> Tensor:
    """The float32 values of a [rows, cols] matrix after MXFP4 with power-of-two scales per 32 columns."""
    groups = w.view(-1, GROUP)
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(1, keepdim=True).clamp(min=1e-30) / 6)))
    scaled = groups / scale
    magnitude = scaled.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (torch.round(scaled / step) * step * scale).view(w.shape)


class _Rounded(torch.autograd.Function):
    """All matrices of one encoding at once: a rounded copy forward, the same gradient back."""

    @staticmethod
    def forward(ctx, encoding: str, *matrices: Tensor) -> tuple[Tensor, ...]:
        if encoding == "bf16":
            return tuple(m.bfloat16().float() for m in matrices)
        if encoding == "fp8":
            return tuple(round_fp8(m) for m in matrices)
        flat = round_mxfp4(torch.cat([m.reshape(-1, GROUP) for m in matrices]))
        pieces = flat.split([m.numel() // GROUP for m in matrices])
        return tuple(p.view(m.shape) for p, m in zip(pieces, matrices, strict=True))

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *gradients


def stored_values(cfg: ModelConfig, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values a source checkpoint of these weights would hold, differentiable (straight through)."""
    out = dict(named)
    groups: dict[str, list[str]] = {}
    for weight in weights(cfg):
        if weight.name in named and weight.encoding in ("fp8", "mxfp4", "bf16"):
            groups.setdefault(weight.encoding, []).append(weight.name)
    for encoding, names in groups.items():
        out.update(zip(names, _Rounded.apply(encoding, *(named[n] for n in names)), strict=True))
    return out


class DictReader:
    """`dsv4.params.Reader` over a dictionary of float tensors, differentiable."""

    def __init__(self, named: dict[str, Tensor], *, int8: bool) -> None:
        self.named, self.int8 = named, int8

    def _plain(self, names: str | Sequence[str], form: str) -> Tensor:
        parts = [self.named[n] for n in ([names] if isinstance(names, str) else names)]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return whole.int() if form == "i32" else whole

    def __call__(self, names, form, *, rows=slice(None), cols=slice(None)) -> Tensor | Int8Site:
        whole = self._plain(names, form)  # one rank: the slices are the whole matrix
        return Int8Site(whole) if self.int8 and form == "int8" else whole

    def stack(self, names, form) -> Tensor | Int8Site:
        whole = torch.stack([self._plain(group, form) for group in names])
        return Int8Site(whole) if self.int8 else whole


def make_params(
    cfg: ModelConfig, named: dict[str, Tensor], positions: int, *, quantised: bool, drafter: bool, target: object = None
) -> Params:
    """The tree of these weights; `target` reuses a frozen one."""
    wanted = {n: w for n, w in named.items() if drafter or not n.startswith("mtp.")}
    if target is not None:
        wanted = {n: w for n, w in wanted.items() if n.startswith("mtp.")}
    read = DictReader(stored_values(cfg, wanted) if quantised else wanted, int8=quantised)
    return Params(
        target=target or build_target(cfg, read), drafter=build_drafter(cfg, read) if drafter else None,
        rope=rope_tables(cfg, positions, torch.float32),
    )  # fmt: skip
