"""`dsv4.propose` against drafter.md restated in the plainest form: full recompute from taps, no cache, no op table."""

import math

import pytest
import torch
from torch import Tensor

from dsv4.api import forward, propose
from dsv4.config import ModelConfig
from tests.support.models import memory_params, tiny_config, tiny_weights

CFG = tiny_config()
WEIGHTS = tiny_weights(CFG, seed=5)
PARAMS = memory_params(CFG, WEIGHTS, drafter=True)


def rms(x: Tensor, gamma: Tensor | float = 1.0) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + CFG.rms_norm_eps).sqrt() * gamma


def rotate(x: Tensor, positions: Tensor, sign: float = 1.0) -> Tensor:
    """Interleaved rotary on the trailing channels, as complex numbers; x [n, ..., d], one position per leading index."""
    r = CFG.qk_rope_head_dim
    angles = positions.float()[:, None] * CFG.rope_theta ** (-torch.arange(0, r, 2).float() / r)
    turn = torch.polar(torch.ones_like(angles), sign * angles).view(len(x), *[1] * (x.ndim - 2), r // 2)
    tail = torch.view_as_complex(x[..., -r:].unflatten(-1, (-1, 2)).contiguous()) * turn
    return torch.cat([x[..., :-r], torch.view_as_real(tail).flatten(-2)], -1)


def hyper(w: dict[str, Tensor], name: str, streams: Tensor, f) -> Tensor:
    """model.md section 1, one token at a time."""
    m, out = CFG.hc_mult, []
    pre, post, comb = [], [], []
    for x in streams:
        u = x.flatten()
        mix = (w[f"{name}_fn"] @ u) / (u.pow(2).mean() + CFG.rms_norm_eps).sqrt()
        scale, base = w[f"{name}_scale"], w[f"{name}_base"]
        pre.append(torch.sigmoid(mix[:m] * scale[0] + base[:m]) + CFG.hc_eps)
        post.append(2 * torch.sigmoid(mix[m : 2 * m] * scale[1] + base[m : 2 * m]))
        c = (mix[2 * m :] * scale[2] + base[2 * m :]).view(m, m).softmax(1) + CFG.hc_eps
        c = c / (c.sum(0) + CFG.hc_eps)
        for _ in range(CFG.hc_sinkhorn_iters - 1):
            c = c / (c.sum(1, keepdim=True) + CFG.hc_eps)
            c = c / (c.sum(0) + CFG.hc_eps)
        comb.append(c)
    y = f(torch.stack([p @ x for p, x in zip(pre, streams, strict=True)]))
    for t, x in enumerate(streams):
        out.append(torch.stack([post[t][o] * y[t] + sum(comb[t][i, o] * x[i] for i in range(m)) for o in range(m)]))
    return torch.stack(out)


def stage(w: dict[str, Tensor], streams: Tensor, ctx: Tensor, first: int, p: int) -> Tensor:
    """One draft stage on K rows at positions p+1..; `ctx` are rows of positions first..p."""
    k, heads, d, groups = len(streams), CFG.num_attention_heads, CFG.head_dim, CFG.o_groups
    rows = torch.arange(p + 1, p + 1 + k)

    def attend(x: Tensor) -> Tensor:
        x = rms(x, w["attn_norm.weight"])
        q = rms(x @ w["attn.wq_a.weight"].T, w["attn.q_norm.weight"]) @ w["attn.wq_b.weight"].T
        q = rotate(rms(q.view(k, heads, d)), rows)
        own = rotate(rms(x @ w["attn.wkv.weight"].T, w["attn.kv_norm.weight"]), rows)
        seen = rotate(rms(ctx @ w["attn.wkv.weight"].T, w["attn.kv_norm.weight"]), torch.arange(first, p + 1))
        keys = torch.cat([seen, own])
        scores = torch.einsum("qhd,kd->qhk", q, keys) / math.sqrt(d)
        sink = w["attn.attn_sink"].view(1, heads, 1).expand(k, heads, 1)
        probabilities = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        o = rotate(torch.einsum("qhk,kd->qhd", probabilities, keys), rows, -1.0)
        o = o.reshape(k, groups, -1)
        z = torch.einsum("qgi,gri->qgr", o, w["attn.wo_a.weight"].view(groups, CFG.o_lora_rank, -1))
        return z.flatten(1) @ w["attn.wo_b.weight"].T

    def expert(x: Tensor, stem: str) -> Tensor:
        gate = (x @ w[f"{stem}w1.weight"].T).clamp(max=CFG.swiglu_limit)
        up = (x @ w[f"{stem}w3.weight"].T).clamp(-CFG.swiglu_limit, CFG.swiglu_limit)
        return (gate * torch.sigmoid(gate) * up) @ w[f"{stem}w2.weight"].T

    def experts(x: Tensor) -> Tensor:
        x, out = rms(x, w["ffn_norm.weight"]), []
        for row in x:
            scores = torch.log1p(torch.exp(w["ffn.gate.weight"] @ row)).sqrt()
            chosen = (scores + w["ffn.gate.bias"]).topk(CFG.num_experts_per_tok).indices.tolist()
            total = sum(scores[e] for e in chosen)
            y = sum(scores[e] / total * CFG.routed_scaling_factor * expert(row, f"ffn.experts.{e}.") for e in chosen)
            out.append(y + expert(row, "ffn.shared_experts."))
        return torch.stack(out)

    return hyper(w, "hc_ffn", hyper(w, "hc_attn", streams, attend), experts)


def restated(
    cfg: ModelConfig, w: dict[str, Tensor], taps: Tensor, anchor: int, k: int
) -> tuple[Tensor, Tensor, list[int]]:
    """(logits [k, V], confidence [k], tokens) after a context of len(taps) tokens."""
    p = len(taps) - 1
    first = max(0, p - cfg.sliding_window + 1)
    ctx = rms(taps @ w["mtp.0.main_proj.weight"].T, w["mtp.0.main_norm.weight"])[first:]
    ids = torch.tensor([anchor] + [cfg.dspark_noise_token_id] * (k - 1))
    streams = w["embed.weight"][ids][:, None].repeat(1, cfg.hc_mult, 1)
    for s in range(3):
        part = {n.removeprefix(f"mtp.{s}."): v for n, v in w.items() if n.startswith(f"mtp.{s}.")}
        streams = stage(part, streams, ctx, first, p)
    last = {n.removeprefix("mtp.2."): v for n, v in w.items() if n.startswith("mtp.2.")}
    u = streams.flatten(1)
    mix = (u @ last["hc_head_fn"].T) / (u.pow(2).mean(-1, keepdim=True) + cfg.rms_norm_eps).sqrt()
    h = ((torch.sigmoid(mix * last["hc_head_scale"] + last["hc_head_base"]) + cfg.hc_eps)[..., None] * streams).sum(1)
    base = rms(h, last["norm.weight"]) @ w["head.weight"].T
    logits, confidence, tokens = [], [], []
    before = anchor
    for row in range(k):
        memory = last["markov_head.markov_w1.weight"][before]
        logits.append(base[row] + last["markov_head.markov_w2.weight"] @ memory)
        confidence.append(torch.sigmoid(last["confidence_head.proj.weight"] @ torch.cat([h[row], memory]))[0])
        before = int(logits[-1].argmax())
        tokens.append(before)
    return torch.stack(logits), torch.stack(confidence), tokens


def sequence(length: int) -> Tensor:
    return torch.randint(0, CFG.vocab_size, (length,), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("k", [5, 7])
@pytest.mark.parametrize("context", [1, 2, 127, 128, 129, 300])
def test_propose_equals_the_equations(context: int, k: int) -> None:
    ids = sequence(context + 1)
    taps = forward(CFG, PARAMS, ids[:-1]).taps
    logits, confidence, tokens = restated(CFG, WEIGHTS, taps, int(ids[-1]), k)
    got = propose(CFG, PARAMS, ids, k=k)
    assert got.tokens.tolist() == tokens
    assert (got.logits - logits).abs().max() < 1e-4
    assert (got.confidence - confidence).abs().max() < 1e-5


def test_a_wider_block_changes_every_draft() -> None:
    """Attention in the block is not causal: K = 5 is not the first five of K = 7 (drafter.md section 6)."""
    five, seven = (propose(CFG, PARAMS, sequence(40), k=k).logits for k in (5, 7))
    assert ((five - seven[:5]).abs().amax(-1) > 1e-3).all()


def test_taps_are_means_after_the_layers() -> None:
    assert forward(CFG, PARAMS, sequence(9)).taps.shape == (9, 3 * CFG.hidden_size)
