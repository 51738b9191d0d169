"""The parameter trees, and the one place that says which checkpoint tensors make up each leaf.

`build_params(cfg, read)` is the whole declaration. What `read` returns decides what comes out: real slices of safetensors
(`checkpoint.load`), meta tensors (capture without weights), or random ones (tests). Layers of different kinds have different
types, so the forward pass dispatches on type and holds no flags.

Weights that share an input are stored as one matrix, rows in the order of the names below; the model splits the product.
A matrix is a `Tensor` (bf16 or float) or, at the int8 sites of W8A8, a `QuantWeight`.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.mesh import SINGLE, Mesh
from dsv4.tree import QuantWeight, tree

Matrix = Tensor | QuantWeight


class Reader(Protocol):
    """Fetches checkpoint tensors by name, sliced, in the form a leaf wants.

    form "act": bf16, or the float dtype asked for; "int8": QuantWeight, or a float Tensor; "f32": float32; "i32": int32.
    `rows` and `cols` slice the stored [out, in] matrix (or the vector); several names are concatenated over rows.
    """

    def __call__(
        self,
        names: str | Sequence[str],
        form: Literal["act", "int8", "f32", "i32"],
        *,
        rows: slice | Sequence[slice] = slice(None),
        cols: slice = slice(None),
    ) -> Matrix: ...

    def stack(self, names: Sequence[Sequence[str]], form: Literal["int8"]) -> Matrix:
        """[len(names), rows, cols]: one matrix per inner list, each a row-wise concatenation."""
        ...


@tree
class HyperConnection:
    """mHC of one sublayer (model.md section 1): fn f32 [24, M*D], base [24], scale [3]."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@tree
class HyperHead:
    """Collapses the streams before a head: fn f32 [M, M*D], base [M], scale [1]."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@tree
class Compressor:
    """Position bias and norm of a compressor; its projections are rows of the layer's `w_in`. ape f32 [r, c*d]."""

    ape: Tensor
    norm: Tensor


@tree
class WindowAttention:
    """Sliding-window attention (SWA). w_in [Q+d, D] = wq_a | wkv; wq_b [H*d, Q]; wo_a [G, R, H*d/G]; wo_b [D, G*R]."""

    w_in: Matrix
    q_norm: Tensor
    kv_norm: Tensor
    wq_b: Matrix
    sink: Tensor
    wo_a: Matrix
    wo_b: Matrix


@tree
class HcaAttention(WindowAttention):
    """Heavily compressed attention (ratio 128). w_in adds compressor wkv | wgate, each [d, D]."""

    compressor: Compressor


@tree
class CsaAttention(WindowAttention):
    """Compressed sparse attention (ratio 4). w_in adds compressor wkv | wgate [2d, D] each, index compressor wkv | wgate
    [2*Di, D] each, weights_proj [Ni, D]; wq_b adds the indexer's [Ni*Di, Q]."""

    compressor: Compressor
    index_compressor: Compressor


@tree
class LearnedRouter:
    """gate f32 [E, D]; bias f32 [E] selects only."""

    gate: Tensor
    bias: Tensor


@tree
class HashRouter:
    """gate f32 [E, D] still gives the weights; tid2eid int32 [V, k] chooses."""

    gate: Tensor
    tid2eid: Tensor


@tree
class Experts:
    """Local routed experts, then the shared one as the last. w13 [E+1, 2I, D] = w1 | w3; w2 [E+1, D, I]."""

    w13: Matrix
    w2: Matrix


@tree
class Layer:
    hc_attn: HyperConnection
    attn_norm: Tensor
    attn: WindowAttention
    hc_ffn: HyperConnection
    ffn_norm: Tensor
    router: LearnedRouter | HashRouter
    experts: Experts


@tree
class Target:
    """embed [V, D]; head [V/tp, D]."""

    embed: Tensor
    layers: tuple[Layer, ...]
    hc_head: HyperHead
    norm: Tensor
    head: Matrix


@tree
class Drafter:
    """main_proj [D, 3D] and main_norm make the context; Markov tables [V, M]; confidence f32 [1, D+M]."""

    main_proj: Matrix
    main_norm: Tensor
    stages: tuple[Layer, ...]
    hc_head: HyperHead
    norm: Tensor
    markov_w1: Tensor
    markov_w2: Matrix
    confidence: Tensor


@tree
class RopeTables:
    """cos | sin by position, [positions, rope_dim]: `plain` for SWA layers and stages, `yarn` for compressed layers."""

    plain: Tensor
    yarn: Tensor


@tree
class Params:
    target: Target
    drafter: Drafter | None
    rope: RopeTables


def _compressor(read: Reader, prefix: str) -> Compressor:
    return Compressor(ape=read(prefix + "ape", "f32"), norm=read(prefix + "norm.weight", "act"))


def _attention(cfg: ModelConfig, mesh: Mesh, read: Reader, prefix: str, kind: str) -> WindowAttention:
    heads, groups, d, rank = mesh.heads(cfg), mesh.groups(cfg), cfg.head_dim, cfg.o_lora_rank
    head_rows = slice(heads.start * d, heads.stop * d)
    group_rows = slice(groups.start * rank, groups.stop * rank)
    w_in = ["wq_a.weight", "wkv.weight"]
    wq_b, wq_b_rows = ["wq_b.weight"], [head_rows]
    more: dict[str, Compressor] = {}
    if kind != "swa":
        w_in += ["compressor.wkv.weight", "compressor.wgate.weight"]
        more["compressor"] = _compressor(read, prefix + "compressor.")
    if kind == "csa":
        inner = "indexer.compressor."
        w_in += [inner + "wkv.weight", inner + "wgate.weight", "indexer.weights_proj.weight"]
        more["index_compressor"] = _compressor(read, prefix + inner)
        wq_b.append("indexer.wq_b.weight")  # every rank scores with all index heads: the selection needs the whole sum
        wq_b_rows.append(slice(None))
    wo_a = read(prefix + "wo_a.weight", "act", rows=group_rows)
    wo_b = {"rows": mesh.hidden(cfg)} if mesh.exact else {"cols": group_rows}
    node = {"swa": WindowAttention, "hca": HcaAttention, "csa": CsaAttention}[kind]
    return node(
        w_in=read([prefix + name for name in w_in], "act"),
        q_norm=read(prefix + "q_norm.weight", "act"),
        kv_norm=read(prefix + "kv_norm.weight", "act"),
        wq_b=read([prefix + name for name in wq_b], "int8", rows=wq_b_rows),
        sink=read(prefix + "attn_sink", "f32", rows=heads),
        wo_a=wo_a.view(groups.stop - groups.start, rank, wo_a.shape[1]),
        wo_b=read(prefix + "wo_b.weight", "int8", **wo_b),
        **more,
    )


def _experts(cfg: ModelConfig, mesh: Mesh, read: Reader, prefix: str) -> Experts:
    local = mesh.experts(cfg)
    stems = [f"{prefix}experts.{e}." for e in range(local.start, local.stop)] + [f"{prefix}shared_experts."]
    return Experts(
        w13=read.stack([(stem + "w1.weight", stem + "w3.weight") for stem in stems], "int8"),
        w2=read.stack([(stem + "w2.weight",) for stem in stems], "int8"),
    )


def _layer(cfg: ModelConfig, mesh: Mesh, read: Reader, prefix: str, kind: str, hashed: bool) -> Layer:
    def hyper(site: str) -> HyperConnection:
        return HyperConnection(**{part: read(f"{prefix}hc_{site}_{part}", "f32") for part in ("fn", "base", "scale")})

    gate = read(prefix + "ffn.gate.weight", "f32")
    if hashed:
        router = HashRouter(gate=gate, tid2eid=read(prefix + "ffn.gate.tid2eid", "i32"))
    else:
        router = LearnedRouter(gate=gate, bias=read(prefix + "ffn.gate.bias", "f32"))
    return Layer(
        hc_attn=hyper("attn"),
        attn_norm=read(prefix + "attn_norm.weight", "act"),
        attn=_attention(cfg, mesh, read, prefix + "attn.", kind),
        hc_ffn=hyper("ffn"),
        ffn_norm=read(prefix + "ffn_norm.weight", "act"),
        router=router,
        experts=_experts(cfg, mesh, read, prefix + "ffn."),
    )


def _hyper_head(read: Reader, prefix: str) -> HyperHead:
    return HyperHead(**{part: read(f"{prefix}hc_head_{part}", "f32") for part in ("fn", "base", "scale")})


def build_target(cfg: ModelConfig, read: Reader, mesh: Mesh = SINGLE) -> Target:
    """The target's tree for one rank."""
    return Target(
        embed=read("embed.weight", "act"),
        layers=tuple(
            _layer(cfg, mesh, read, f"layers.{i}.", kind, i < cfg.num_hash_layers) for i, kind in enumerate(cfg.kinds)
        ),
        hc_head=_hyper_head(read, ""),
        norm=read("norm.weight", "act"),
        head=read("head.weight", "act", rows=mesh.vocabulary(cfg)),
    )


def build_drafter(cfg: ModelConfig, read: Reader, mesh: Mesh = SINGLE) -> Drafter:
    """The drafter's tree for one rank. Stages are never hash routed, whatever their index (drafter.md section 3)."""
    last = f"mtp.{cfg.num_stages - 1}."
    return Drafter(
        main_proj=read("mtp.0.main_proj.weight", "act"),
        main_norm=read("mtp.0.main_norm.weight", "act"),
        stages=tuple(_layer(cfg, mesh, read, f"mtp.{s}.", "swa", False) for s in range(cfg.num_stages)),
        hc_head=_hyper_head(read, last),
        norm=read(last + "norm.weight", "act"),
        markov_w1=read(last + "markov_head.markov_w1.weight", "act"),
        markov_w2=read(last + "markov_head.markov_w2.weight", "act"),
        confidence=read(last + "confidence_head.proj.weight", "f32"),
    )


def act_dtype(params: Params) -> torch.dtype:
    """The dtype activations are rounded to where they meet a weight or a cache: bf16 in W8A8, else the float dtype."""
    return params.target.embed.dtype
