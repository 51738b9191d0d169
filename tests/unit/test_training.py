"""The training op set computes what the plain one defines, values and gradients."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch

from dsv4.api import forward, propose
from dsv4.batch import make_row_state
from dsv4.cache import PAGE_TOKENS, Pages, make_cache
from dsv4.checkpoint.formats import decode_e8m0, decode_fp8, decode_mxfp4, encode_fp8, encode_mxfp4
from dsv4.model.context import Env, step_context
from dsv4.model.layer import logits as head_logits
from dsv4.model.target import backbone
from dsv4.ops import plain
from dsv4.ops.table import PLAIN
from tests.support.models import memory_params, tiny_config, tiny_weights
from tools.training.drafter import draft_losses
from tools.training.forward import Sequences
from tools.training.functions import RoundInt8, SinkAttention, Sinkhorn
from tools.training.plot import Curve, svg
from tools.training.training import learning_rate
from tools.training.weights import hash_table, make_params, round_fp8, round_mxfp4


@pytest.fixture(scope="module")
def tiny():
    cfg = tiny_config()
    return cfg, tiny_weights(cfg)


def test_whole_sequences_agree_with_the_serving_forward(tiny):

    cfg, weights = tiny
    params = memory_params(cfg, weights, drafter=True, positions=512)
    ids = torch.randint(0, cfg.vocab_size, (2, 256), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    got, taps, _ = Sequences(cfg, 2, 256, torch.float32, select=True).target(params, ids)
    for row, sequence in enumerate(ids):
        want = forward(cfg, params, sequence, ops=PLAIN)
        torch.testing.assert_close(got.view(2, 256, -1)[row], want.logits, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(plain.taps(taps).view(2, 256, -1)[row], want.taps, atol=2e-4, rtol=1e-4)


def test_draft_blocks_agree_with_propose(tiny):

    cfg, weights = tiny
    params = memory_params(cfg, weights, drafter=True, positions=512)
    ids = torch.randint(0, cfg.vocab_size, (2, 256), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    sequences = Sequences(cfg, 2, 256, torch.float32, select=True)
    _, taps, at = sequences.target(params, ids)
    anchors = torch.tensor([[1, 7, 200], [3, 128, 240]])
    _, base = sequences.blocks(params, taps, at, anchors, 7)
    for n, (row, position) in enumerate((r, p) for r in (0, 1) for p in anchors[r].tolist()):
        drafts = plain.markov(
            base[n : n + 1], params.drafter.markov_w1, params.drafter.markov_w2, ids[row, position].view(1)
        )
        want = propose(cfg, params, ids[row, : position + 1], 7, ops=PLAIN)
        assert drafts[0].tolist() == want.tokens.tolist()


def test_gradients_agree_with_the_plain_operators(tiny):
    cfg, weights = tiny
    ids = torch.randint(0, cfg.vocab_size, (1, 128), dtype=torch.int32, generator=torch.Generator().manual_seed(2))
    gradients = []
    for ops in ("training", "plain"):
        named = {n: w.clone().requires_grad_(w.is_floating_point()) for n, w in weights.items()}
        params = make_params(cfg, named, 256, quantised=False, drafter=False)
        sequences = Sequences(cfg, 1, 128, torch.float32, select=True)
        logits = _plain_logits(sequences, params, ids) if ops == "plain" else sequences.target(params, ids)[0]
        torch.nn.functional.cross_entropy(logits, ids.flatten().long().roll(-1)).backward()
        gradients.append({n: w.grad for n, w in named.items() if w.grad is not None})
    got, want = gradients
    for name in want.keys() & got.keys():
        scale = want[name].abs().max().clamp(min=1e-6)
        assert ((got[name] - want[name]).abs().max() / scale) < 2e-2, name


def _plain_logits(sequences, params, ids):
    env = Env(cfg=sequences.env.cfg, ops=PLAIN)
    pages = {group: -(-ids.shape[1] // size) for group, size in PAGE_TOKENS.items()}
    cache = make_cache(env.cfg, Pages(**{g: n + 1 for g, n in pages.items()}), torch.float32, drafter=False)
    state = make_row_state(1, pages, 0)
    for group, count in pages.items():
        getattr(state.tables, group)[0] = torch.arange(1, count + 1, dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    at = step_context(env, state.tables, params.rope, zero, ids, zero, zero + ids.shape[1], 1)
    streams, _, _ = backbone(env, params.target, cache, at)
    target = params.target
    return head_logits(env, target.hc_head, target.norm, target.head, streams)[1]


def test_hand_written_gradients():
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 4, 4, dtype=torch.float64, generator=rng, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: Sinkhorn.apply(x, 200, 1e-12), (logits,), atol=2e-4)
    q = torch.randn(2, 3, 2, 4, dtype=torch.float64, generator=rng)
    keys = torch.randn(2, 5, 4, dtype=torch.float64, generator=rng)
    sink = torch.randn(2, dtype=torch.float64, generator=rng)
    seen = torch.rand(2, 3, 5, generator=rng) > 0.3

    def naive(q, keys, sink):
        scores = torch.einsum("nqhd,nkd->nqhk", q, keys) * 0.5
        scores = scores.masked_fill(~seen.unsqueeze(2), -torch.inf)
        both = torch.cat([scores, sink.view(1, 1, -1, 1).expand(2, 3, 2, 1)], -1).softmax(-1)
        return torch.einsum("nqhk,nkd->nqhd", both[..., :-1], keys)

    results = []
    for fn in (naive, lambda q, k, s: SinkAttention.apply(q, k, seen, s, 0.5, torch.float64)[0]):
        leaves = [x.clone().requires_grad_() for x in (q, keys, sink)]
        out = fn(*leaves)
        out.double().square().sum().backward()
        results.append([out.double(), *(x.grad for x in leaves)])
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_simulated_rounding_is_that_of_the_formats():
    w = torch.randn(200, 160, generator=torch.Generator().manual_seed(4)) * 0.1
    codes, scale = encode_fp8(w)
    torch.testing.assert_close(round_fp8(w), decode_fp8(codes, decode_e8m0(scale, "w")), atol=0, rtol=0)
    codes, scale = encode_mxfp4(w)
    torch.testing.assert_close(round_mxfp4(w), decode_mxfp4(codes, decode_e8m0(scale, "w")), atol=0, rtol=0)
    q, back = plain.quantise(w)
    torch.testing.assert_close(RoundInt8.apply(w), q.float() * back)


def test_draft_losses_are_zero_for_the_target_itself_and_count_leading_agreement():
    rng = torch.Generator().manual_seed(5)
    target = torch.randn(3, 7, 50, generator=rng)
    labels = target.argmax(-1)
    same = draft_losses(target, torch.full((3, 7), 9.0), target, labels, 4.0)
    assert same["tv"] == pytest.approx(0, abs=1e-5)
    assert same["chain"] == 8
    wrong = target.clone()
    wrong[:, 2, labels[:, 2] * 0] += 100  # token 0 at the third row
    expected = [1 + 2 if label else 1 + 7 for label in labels[:, 2].tolist()]
    figures = draft_losses(wrong, torch.zeros(3, 7), target, labels, 4.0)
    assert figures["chain"] == pytest.approx(sum(expected) / 3)
    assert figures["tv"] > 0


def test_hash_tables_share_the_load():
    cfg = tiny_config(vocab_size=400)
    counts = 1e6 / torch.arange(1, 401).double() ** 1.1
    table = hash_table(cfg, counts, torch.Generator().manual_seed(6))
    assert all(len(set(row)) == cfg.num_experts_per_tok for row in table.tolist())
    load = torch.zeros(cfg.n_routed_experts, dtype=torch.float64).index_add_(0, table[:, 0], counts)
    load.index_add_(0, table[:, 1], counts)
    assert load.max() / load.mean() < 1.5


def test_the_level_part_of_the_schedule_does_not_depend_on_the_end():
    early = [learning_rate(step, 1000, 100, 0.6) for step in range(1000)]
    assert early[:600] == [learning_rate(step, 2000, 100, 0.6) for step in range(600)]
    assert early[99] == early[600] == 1.0 and 0 < early[999] < 0.01
    assert all(a >= b for a, b in pairwise(early[100:]))


def test_curves_become_valid_svg():
    picture = svg([("a < b", "step", [Curve(name="x", points=[(0, 3.0), (10, 1.5), (20, 1.25)])])] * 2)
    root = ElementTree.fromstring(picture)
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 2
