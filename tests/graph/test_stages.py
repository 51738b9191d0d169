"""Capture, donation, the door of a compiled step, and the targets that run the graph as it is."""

import pytest
import torch
from torch import Tensor

from dsv4.config import StepShape
from dsv4.errors import CaptureError
from dsv4.graph import StepProgram, targets
from dsv4.ops.table import PLAIN as ops
from dsv4.tree import abstract, map_leaves, tree
from tests.graph import toy

SHAPE = StepShape("decode", 4, 1, 1)


def program(fn, donated=("cache",)) -> StepProgram:
    return StepProgram("toy", fn, SHAPE, donated)


def trace(fn, donated=("cache",)):
    return program(fn, donated).trace(toy.weights(), toy.pools(), toy.inputs())


def plain_step(params: toy.Weights, cache: toy.Pools, batch: toy.Inputs):
    """Plain operators: norm, product, write, read back."""
    x = ops.rms_norm(batch.x, params.b[0], 1e-6)
    pool = ops.scatter(cache.layers[0], batch.slots, x)
    y = ops.linear(ops.take(pool, batch.slots), params.w)
    return toy.Outputs(y=y), toy.Pools(layers=(pool, cache.layers[1]))


# ---- capture ----


def test_inputs_are_named_by_their_path():
    traced = trace(plain_step)
    assert [leaf.path for leaf in traced.args_info] == [
        "params.w", "params.b", "cache.layers[0]", "cache.layers[1]", "batch.x", "batch.slots"
    ]  # fmt: skip
    assert [leaf.name for leaf in traced.args_info][2] == "cache_layers_0"
    assert [leaf.donated for leaf in traced.args_info] == [False, False, True, True, False, False]
    assert [(r.path, r.fresh) for r in traced.out_info] == [
        ("[0].y", True), ("[1].layers[0]", False), ("[1].layers[1]", False)
    ]  # fmt: skip


def test_capture_reads_no_values_and_needs_no_memory():
    args = [toy.weights(), toy.pools(), toy.inputs()]
    abstracted = program(plain_step).trace(*map(abstract, args))
    assert abstracted.as_text() == program(plain_step).trace(*args).as_text()


def test_text_counts_and_lines(tmp_path):
    traced = trace(plain_step)
    assert traced.histogram()["aten.mm"] == 1
    assert traced.node_count == sum(traced.histogram().values())
    line = next(line for line in traced.as_text().splitlines() if "aten.mm(" in line)
    assert "f32[4, 4]" in line and "graph/test_stages.py:" in line and line.endswith("in plain_step")
    assert traced.save(tmp_path / "dumps" / "toy.txt").read_text() == traced.as_text() + "\n"


def test_unused_operators_leave_no_node():
    def fn(params, cache, batch):
        _ = toy.mix(batch.x, params.w)
        return toy.Outputs(y=toy.mix(batch.x, params.b)), cache

    assert trace(fn).histogram() == {"toy.mix": 1}


def test_tensors_made_inside_live_on_the_device_of_the_program():
    def fn(params, cache, batch):
        return toy.Outputs(y=batch.x + torch.arange(8) + torch.ones(8, device=batch.x.device)), cache

    assert "meta" not in trace(fn).as_text()


BROKEN = {
    "nonzero": (lambda x: x.nonzero(), r"aten\.nonzero\.default has a shape that depends on data"),
    "mask": (lambda x: x[x > 0], r"aten\.(index\.Tensor|nonzero\.default) has a shape that depends on data"),
    "item": (lambda x: x.sum().item(), r"aten\._local_scalar_dense\.default reads a tensor's value on the host"),
    "branch": (lambda x: x if x.sum() > 0 else -x, "reads a tensor's value on the host"),
    "int": (lambda x: x[: int(x[0, 0])], "reads a tensor's value on the host"),
    "tolist": (lambda x: torch.tensor(x.tolist()), "a tensor's value is read on the host"),
    "numpy": (lambda x: torch.from_numpy(x.numpy()), "a tensor's value is read on the host"),
    "random": (lambda x: x + torch.rand_like(x), r"aten\.rand_like\.default draws random numbers"),
    "unknown": (lambda x: torch.ops.toy.shapeless(x), r"toy\.shapeless\.default has no shape function"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_static_graph_fails_with_operator_and_line(name: str):
    broken, message = BROKEN[name]

    def fn(params, cache, batch):
        return toy.Outputs(y=broken(batch.x)), cache

    with pytest.raises(CaptureError, match=message + r".*test_stages\.py:\d+ in ") as raised:
        trace(fn)
    assert "in fn" in raised.value.__notes__[0], "the way there is kept"


def test_an_ordinary_mistake_keeps_its_type_and_gains_the_place():
    with pytest.raises(RuntimeError) as raised:
        trace(lambda params, cache, batch: (batch.x @ batch.x, cache))
    assert "while capturing toy decode[4x1, 1 pages]: aten.mm.default at" in raised.value.__notes__[0]


def test_wrong_arguments_and_names():
    with pytest.raises(CaptureError, match="expected arguments params, cache, batch, got 2"):
        program(plain_step).trace(toy.weights(), toy.pools())
    with pytest.raises(CaptureError, match=r"donated pool: expected arguments among \['params', 'cache', 'batch'\]"):
        trace(plain_step, donated=("pool",))
    assert trace(plain_step, donated=(1,)).args_info[2].donated


# ---- donation ----


def test_a_write_to_what_is_not_donated():
    def fn(params, cache, batch):
        ops.scatter(params.w, batch.slots % 4, batch.x)
        return toy.Outputs(y=params.w), cache

    with pytest.raises(CaptureError, match=r"aten\.index_put_ writes params\.w, which is not donated \(.*in fn\)"):
        trace(fn)


def test_a_write_through_a_view_is_seen():
    def fn(params, cache, batch):
        toy.put(params.w.view(2, 2, 8)[1], batch.slots, batch.x)
        return toy.Outputs(y=batch.x), cache

    with pytest.raises(CaptureError, match=r"toy\.put writes params\.w"):
        trace(fn)


def test_a_written_leaf_must_come_back():
    def fn(params, cache, batch):
        toy.put(cache.layers[0], batch.slots, batch.x)
        return toy.Outputs(y=batch.x), toy.Pools(layers=cache.layers[1:])

    with pytest.raises(CaptureError, match=r"cache\.layers\[0\] is donated and written by toy\.put .* not returned"):
        trace(fn)


def test_a_written_leaf_must_come_back_in_its_place():
    def fn(params, cache, batch):
        pool = toy.put(cache.layers[0], batch.slots, batch.x)
        return toy.Outputs(y=batch.x), toy.Pools(layers=(cache.layers[1], pool))

    with pytest.raises(
        CaptureError, match=r"cache\.layers\[0\] is written in place but comes back as \[1\]\.layers\[1\]"
    ):
        trace(fn)


def test_a_donated_leaf_must_not_be_replaced():
    def fn(params, cache, batch):
        return toy.Outputs(y=batch.x), toy.Pools(layers=(cache.layers[0] * 2, cache.layers[1]))

    with pytest.raises(
        CaptureError, match=r"cache\.layers\[0\] is donated, but \[1\]\.layers\[0\] of the result is a new"
    ):
        trace(fn)


def test_reads_before_the_write_and_second_writes_can_be_asked_for():
    def fn(params, cache, batch):
        first, second = cache.layers
        early = second[:4]  # a view alone reads nothing
        x = toy.mix(batch.x, first[:4])
        first = toy.put(first, batch.slots, x)
        second = toy.put(toy.put(second, batch.slots, x), batch.slots, batch.x)
        return toy.Outputs(y=toy.mix(early, first[4:8])), toy.Pools(layers=(first, second))

    traced = trace(fn)
    (read,) = traced.reads_before_write()
    assert read.startswith("cache.layers[0]: toy.mix reads it (") and "before toy.put writes it" in read
    (write,) = traced.repeated_writes()
    assert write.startswith("cache.layers[1]: written 2 times, again by toy.put (")
    assert trace(plain_step).reads_before_write() == trace(plain_step).repeated_writes() == ()


# ---- targets that run the graph as it is ----


def run_both(fn, target: str):
    params, cache, batch = toy.weights(), toy.pools(), toy.inputs()
    mirror = map_leaves(torch.clone, cache)
    compiled = program(fn).trace(params, cache, batch).lower(target).compile(bind={"params": params, "cache": cache})
    expected, _ = fn(params, mirror, batch)
    got, back = compiled(batch)
    assert back.layers[0] is cache.layers[0]
    return (expected.y, mirror.layers[0]), (got.y, cache.layers[0])


def test_plain_replays_the_operators():
    expected, got = run_both(plain_step, "plain")
    assert all(map(torch.equal, expected, got))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # torch's own, on importing Inductor
def test_inductor_compiles_the_graph():
    expected, got = run_both(plain_step, "inductor")
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b)


def tape_step(params: toy.Weights, cache: toy.Pools, batch: toy.Inputs):
    """What `plain_step` is to the other targets: a write and a fresh result, of operators a tape can run."""
    pool = toy.put(cache.layers[0], batch.slots, toy.mix(batch.x, params.b[0]))
    return toy.Outputs(y=toy.mix(batch.x, batch.x)), toy.Pools(layers=(pool, cache.layers[1]))


@pytest.mark.parametrize(("target", "fn"), [("cpu", tape_step), ("plain", plain_step)])
def test_a_replay_on_host_arrays(target, fn):
    params, cache, batch = toy.weights(), toy.pools(), toy.inputs()
    options = {"machine": toy.MACHINE} if target == "cpu" else {}
    lowered = program(fn).trace(params, cache, batch).lower(target, **options)
    compiled = lowered.compile(bind={"params": params, "cache": cache})
    arrays = {"x": batch.x.numpy(), "slots": batch.slots.numpy()}
    kept = compiled.on_host(arrays)
    assert list(kept) == ["y"]
    first = kept["y"].copy()
    assert (first == compiled(batch)[0].y.numpy()).all()
    other = {"slots": arrays["slots"], "x": 2 * arrays["x"] + 1}  # in any order
    assert (compiled.on_host(other)["y"] != first).any()
    assert (kept["y"] == first).all(), "the next replay wrote into a result that was handed out"

    for wrong, message in (
        ({"x": arrays["x"]}, "no array 'slots'; expected ..x., .slots.., got ..x.."),
        (arrays | {"x": arrays["x"][:2]}, r"x: expected float32 \[4, 8\], got float32 \[2, 8\]"),
        (arrays | {"slots": arrays["slots"].astype("int64")}, r"slots: expected int32 \[4\], got int64 \[4\]"),
    ):
        with pytest.raises(TypeError, match=message):
            compiled.on_host(wrong)
    assert compiled.replays == 3


def test_targets_are_a_registry():
    assert {"plain", "cpu", "inductor"} <= set(targets())
    with pytest.raises(CaptureError, match="no target 'gpu'; there are cpu"):
        trace(plain_step).lower("gpu")


def test_nothing_has_to_be_bound():
    params, cache, batch = toy.weights(), toy.pools(), toy.inputs()
    compiled = program(plain_step).trace(params, cache, batch).lower("plain").compile()
    out, back = compiled(params, cache, batch)
    assert back.layers[0] is cache.layers[0] and back.layers[1] is cache.layers[1]
    assert torch.equal(cache.layers[0][batch.slots.long()], ops.rms_norm(batch.x, params.b[0], 1e-6))
    assert out.y.shape == (4, 4)


# ---- the door ----


@tree
class Other:
    x: Tensor
    slots: Tensor


def compiled(**bind):
    bind = bind or {"params": toy.weights(), "cache": toy.pools()}
    return trace(plain_step).lower("plain").compile(bind=bind)


DOOR = {
    "dtype": (lambda b: (toy.Inputs(x=b.x.double(), slots=b.slots),), r"batch\.x: expected torch.float32 \[4, 8\]"),
    "shape": (lambda b: (toy.Inputs(x=b.x, slots=b.slots[:3]),), r"batch\.slots: expected torch.int32 \[4\].*\[3\]"),
    "device": (lambda b: (abstract(b),), r"batch\.x: expected a tensor on cpu, got one on meta"),
    "type": (lambda b: (Other(x=b.x, slots=b.slots),), "batch: expected Inputs, got Other"),
    "none": (
        lambda b: (toy.Inputs(x=None, slots=b.slots),),
        r"batch\.x: expected torch.float32 \[4, 8\], got NoneType",
    ),
    "many": (lambda b: (b, b), r"expected arguments \(batch\), got 2"),
    "few": (lambda b: (), r"expected arguments \(batch\), got 0"),
}


@pytest.mark.parametrize("name", DOOR)
def test_a_call_that_does_not_fit_names_the_leaf(name: str):
    make, message = DOOR[name]
    with pytest.raises(TypeError, match=message):
        compiled()(*make(toy.inputs()))


def test_leaves_that_are_no_tensors_are_fixed_by_capture():
    def fn(batch):
        return batch[0] + (batch[1]["a"] if batch[2] is None else 0), batch[2]

    run = program(fn, ()).trace((torch.ones(2), {"a": torch.ones(2)}, None)).lower("plain").compile()
    total, nothing = run((torch.ones(2), {"a": torch.ones(2)}, None))
    assert total.tolist() == [2, 2] and nothing is None
    with pytest.raises(TypeError, match=r"was None when captured, got 3"):
        run((torch.ones(2), {"a": torch.ones(2)}, 3))
    with pytest.raises(TypeError, match="batch: expected the structure"):
        run((torch.ones(2), {"b": torch.ones(2)}, None))


def test_what_is_bound_is_checked_once_by_name():
    with pytest.raises(
        CaptureError, match=r"bound params\.w: expected torch.float32 \[4, 8\], got torch.float32 \[2, 8\]"
    ):
        compiled(params=toy.weights(2))
    with pytest.raises(CaptureError, match=r"bound cache: expected the structure|bound cache: "):
        compiled(cache=toy.pools(3))
    with pytest.raises(CaptureError, match="bind weights: expected some of"):
        compiled(weights=toy.weights())
    strided = toy.Weights(w=torch.randn(8, 4).T, b=torch.randn(4, 8))
    with pytest.raises(CaptureError, match=r"bound params\.w: expected strides \[8, 1\], got \[1, 4\]"):
        compiled(params=strided)
    with pytest.raises(CaptureError, match="rebind batch: bound arguments are"):
        compiled().rebind(batch=toy.inputs())


def test_donated_memory_is_shared_with_nothing():
    pool = torch.zeros(16, 8)
    with pytest.raises(CaptureError, match=r"cache\.layers\[0\] and cache\.layers\[1\] share memory"):
        compiled(params=toy.weights(), cache=toy.Pools(layers=(pool, pool)))
    with pytest.raises(CaptureError, match=r"share memory, and one of them is donated"):
        compiled(
            params=toy.Weights(w=pool[:4], b=torch.zeros(4, 8)), cache=toy.Pools(layers=(pool, torch.zeros(16, 8)))
        )
    tied = torch.zeros(4, 8)
    compiled(params=toy.Weights(w=tied, b=tied), cache=toy.pools())
