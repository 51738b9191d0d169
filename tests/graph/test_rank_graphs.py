"""What ranks say to each other, read from captured graphs: how often, how much, and never inside the Markov chain."""

import pytest
import torch
import torch.distributed as dist

from dsv4.batch import make_row_state
from dsv4.cache import Pages, make_cache
from dsv4.checkpoint.load import abstract_params
from dsv4.checkpoint.tiny import tiny_config
from dsv4.config import ParallelConfig, StepShape, config_from_dict
from dsv4.graph.cann_shim import fake_world
from dsv4.graph.nodes import op_name, tensors_in
from dsv4.mesh import join
from dsv4.model.context import Env
from dsv4.ops.cpu import CPU
from serving.worker import example_batch, step_program

CFG = config_from_dict(tiny_config())
ROWS, K, SLOTS = 3, 7, 4
SHAPES = {
    "prefill": StepShape("prefill", 2, 128, 2),
    "decode": StepShape("decode", ROWS, 1, 2),
    "speculate": StepShape("speculate", ROWS, K + 1, 2),
    "seed": StepShape("seed", ROWS, K, 2),
}


def capture(shape: StepShape, dp: int, tp: int, rank: int = 0):
    """The graph of one rank of a world that is not there."""
    fake_world(rank, dp * tp)
    try:
        mesh = join(ParallelConfig(dp=dp, tp=tp, ep=dp * tp), exact=True)
        k = 0 if shape.kind == "decode" else K
        params = abstract_params(CFG, mesh, k > 0, dtype=torch.float32, max_positions=512)
        pages = Pages(history=9, window=20, tail=60, open=20)
        cache = make_cache(CFG, pages, torch.float32, drafter=k > 0, device="meta")
        state = make_row_state(SLOTS, {"history": 2, "window": 9, "tail": 18, "open": 9}, k, device="meta")
        program = step_program(Env(cfg=CFG, ops=CPU, mesh=mesh), shape)
        return program.trace(params, cache, state, example_batch(shape, CFG.vocab_size)).graph
    finally:
        dist.destroy_process_group()


def exchanges(graph) -> list[tuple[str, int]]:
    """(operator, bytes that this rank ends up with or, for reductions, puts in) in graph order."""
    found = []
    for node in graph.nodes:
        name = op_name(node) if node.op == "call_function" else ""
        if name.startswith("_c10d_functional.") and "wait" not in name and "wrap" not in name:
            whole = node.args[0].meta["val"] if "reduce" in name else tensors_in(node.meta["val"])[0]
            found.append((name.removeprefix("_c10d_functional."), whole.nbytes))
    return found


def planned(tokens: int, layers: int, dp: int, tp: int) -> list[tuple[str, int]]:
    """Five exchanges a layer: projection in and out within TP, rows to experts and back over EP, rows within TP."""
    share, ep, d, k = -(-tokens // tp), dp * tp, CFG.hidden_size, CFG.num_experts_per_tok
    gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
    return [
        (gather, 4 * tokens * CFG.o_groups * CFG.o_lora_rank),
        (gather, 4 * tokens * d),
        (gather, 4 * ep * share * (d + 2 * k)),
        (scatter, 4 * ep * share * k * d),
        (gather, 4 * tp * share * d),
    ] * layers


@pytest.mark.parametrize(("dp", "tp"), [(1, 4), (2, 4), (4, 4)])
@pytest.mark.parametrize("kind", SHAPES)
def test_exchanges_are_those_planned(kind: str, dp: int, tp: int) -> None:
    shape, gather = SHAPES[kind], "all_gather_into_tensor"
    expected: list[tuple[str, int]] = []
    if kind != "seed":
        chosen = shape.rows if kind == "prefill" else shape.tokens
        expected += [*planned(shape.tokens, CFG.num_hidden_layers, dp, tp), (gather, 4 * tp * chosen * 2)]
    if kind in ("speculate", "seed"):
        expected += [*planned(ROWS * K, 3, dp, tp), (gather, 4 * ROWS * K * CFG.vocab_size)]
    assert exchanges(capture(shape, dp, tp)) == expected


def test_nothing_is_exchanged_in_the_markov_chain() -> None:
    graph = capture(SHAPES["speculate"], 2, 4)
    names = [op_name(node) for node in graph.nodes if node.op == "call_function"]
    assert names.count("dsv4.markov") == 1
    assert not [name for name in names[names.index("dsv4.markov") :] if name.startswith("_c10d_functional")]


def test_all_ranks_enter_the_same_exchanges() -> None:
    orders = [exchanges(capture(SHAPES["speculate"], 2, 2, rank)) for rank in range(4)]
    assert orders.count(orders[0]) == 4


def test_one_rank_exchanges_nothing() -> None:
    assert exchanges(capture(SHAPES["decode"], 1, 1)) == []
