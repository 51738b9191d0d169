"""What the comparison with transformers stands on: a drafter that is always right, and a step's products by themselves."""

import math

import numpy as np
import pytest
import torch

from bench.engines import BenchEngine, always_right
from bench.models import Model
from bench.products import live_rows, step_products
from serving.batches import Launch

TOKENS = 41


@pytest.mark.slow
def test_right_drafts_and_bare_products() -> None:
    model = Model(None, 256)
    prompts = torch.randint(2, 2000, (2, 30), generator=torch.Generator().manual_seed(0)).tolist()
    engines = [BenchEngine(model, None, k, 1, adaptive=False, max_num_seqs=2) for k in (0, 7)]
    plain, drafted = engines
    try:
        expected = plain.run(prompts, TOKENS)
        always_right(drafted.started.worker, {tuple(p): t for p, t in zip(prompts, expected.tokens, strict=True)})
        got = drafted.run(prompts, TOKENS)
        steps = drafted.started.engine.stats().speculation.verify_steps
        worker = plain.started.worker
        shape = next(s for s in worker.programs.shapes if (s.kind, s.rows, s.full) == ("decode", 2, False))
        live_rows(worker, range(2), 40, 1 << 20)
        bare, own = step_products(worker, shape, 1)
        bare(), own()
        with torch.no_grad():
            out = worker._replay(Launch(shape, {"slots": np.arange(2, dtype=np.int32)}, 2))
    finally:
        for engine in engines:
            engine.close()
    assert got.tokens == expected.tokens and got.decode_rate > 0
    assert steps == len(prompts) * math.ceil((TOKENS - 1) / 8)
    assert out["count"].tolist() == [1, 1]  # the rows that were seated by hand do run
