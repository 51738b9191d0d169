"""Whole programs of the NPU table, executed on CPU: prefill, decode, speculate and seed on the tiny W8A8 model."""

import dataclasses

import pytest
import torch

from dsv4.api import forward
from dsv4.checkpoint.load import random_params
from dsv4.config import StepShape
from dsv4.ops.npu import npu_ops
from dsv4.ops.npu_params import prepare
from dsv4.ops.table import PLAIN
from dsv4.params import Layer, Params
from dsv4.steps import STEPS
from dsv4.tree import QuantWeight
from tests.support.models import tiny_config
from tests.support.npu_kernels import install
from tests.support.runner import Runner

install()
CFG = tiny_config(quant_format="w8a8")
TOKENS = 24
TIE = 0.05  # of logits with a standard deviation of 4 and a median gap of 1 between the best two


class NpuRunner(Runner):
    """Steps over the NPU table, which is made for one number of tokens a row."""

    def _step(self, kind: str, rows: int, query_len: int, batch):
        shape = StepShape(kind, rows, query_len, self.pages)
        step = STEPS[kind](dataclasses.replace(self.env, ops=npu_ops(query_len, plugins={})), shape)
        with torch.no_grad():
            out, self.cache, self.state = step(self.params, self.cache, self.state, batch)
        return out


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 150, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def calm(params: Params, factor: float) -> Params:
    """Sublayers that add little to the streams. Random ones amplify a relative change of 1e-4 until tokens change, so that
    any two roundings part; trained ones do not."""

    def quieter(w: QuantWeight) -> QuantWeight:
        return dataclasses.replace(w, scale=w.scale * factor)

    def layer(p: Layer) -> Layer:
        attn = dataclasses.replace(p.attn, wo_b=quieter(p.attn.wo_b))
        return dataclasses.replace(p, attn=attn, experts=dataclasses.replace(p.experts, w2=quieter(p.experts.w2)))

    target = dataclasses.replace(params.target, layers=tuple(map(layer, params.target.layers)))
    drafter = dataclasses.replace(params.drafter, stages=tuple(map(layer, params.drafter.stages)))
    return dataclasses.replace(params, target=target, drafter=drafter)


def margin(params: Params, ids: list[int], a: int, b: int) -> float:
    """How far the definition's logits of two next tokens lie apart; logits here spread over about 4."""
    last = forward(CFG, params, ids, ops=PLAIN).logits[-1]
    return (last[a] - last[b]).abs().item()


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_npu_tokens_are_cpu_tokens(seed: int) -> None:
    """Up to ties: where the sequences part, the definition must see the two tokens within TIE of each other."""
    params = calm(random_params(CFG, seed, max_positions=2048), 1 / 16)
    ids = prompt(150 + 70 * seed, seed)
    for k in (0, 7):
        expected = Runner(CFG, params, k=k).generate(0, ids, TOKENS)
        got = NpuRunner(CFG, prepare(params), k=k).generate(0, ids, TOKENS)
        parted = next((i for i in range(TOKENS) if got[i] != expected[i]), None)
        assert parted is None or margin(params, ids + expected[:parted], got[parted], expected[parted]) < TIE


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_every_position_agrees_up_to_ties(seed: int) -> None:
    params, ids = calm(random_params(CFG, seed, max_positions=2048), 1 / 16), prompt(400, seed)
    expected = forward(CFG, params, ids, ops=PLAIN).logits
    got = forward(CFG, prepare(params), ids, ops=npu_ops(128, plugins={})).logits
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] >= TIE
    assert clear.float().mean() > 0.9
    assert torch.equal(got.argmax(-1)[clear], expected.argmax(-1)[clear])


@pytest.mark.parametrize("seed", [6, 7])
def test_speculation_and_chunks_change_no_token(seed: int) -> None:
    """On the restless model: the same kernels see the same rows, so here equality is exact."""
    params, ids = prepare(random_params(CFG, seed, max_positions=2048)), prompt(310, seed)
    plain = NpuRunner(CFG, params, k=0).generate(0, ids, TOKENS)
    runner = NpuRunner(CFG, params, k=7)
    assert runner.generate(0, ids, TOKENS) == plain
    assert runner.generate(1, ids, TOKENS, chunks=[128, 77]) == plain


def test_rows_of_a_batch_do_not_meet() -> None:
    params = prepare(random_params(CFG, 8, max_positions=2048))
    alone = [NpuRunner(CFG, params, k=7).generate(0, prompt(n, n), 10) for n in (40, 200)]
    both = NpuRunner(CFG, params, k=7)
    got = [[both.prefill(slot, prompt(n, n))] for slot, n in enumerate((40, 200))]
    while min(map(len, got)) < 10:
        for tokens, new in zip(got, both.decode([0, 1], rows=4), strict=True):
            tokens += new
    assert [tokens[:10] for tokens in got] == alone
