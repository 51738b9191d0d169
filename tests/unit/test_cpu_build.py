"""Building the kernels, doing without them, and their form as torch operators."""

import concurrent.futures
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dsv4.errors import PlatformError
from dsv4.ops import cpu_build
from dsv4.ops.capturable import CAPTURABLE
from dsv4.ops.cpu import CALL_DTYPE, CPU, KERNELS, cpu_ops, default_ops
from dsv4.ops.cpu_call import CALL, POINTERS
from dsv4.ops.table import op_names
from dsv4.tree import QuantWeight

I32 = torch.int32


@pytest.fixture
def broken(monkeypatch, tmp_path):
    """A process that has not built anything yet, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_build.library.cache_clear()
    yield monkeypatch
    cpu_build.library.cache_clear()


def test_no_compiler_means_plain_and_one_line(broken, caplog, tmp_path):
    broken.delenv("CXX", raising=False)
    broken.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert default_ops() is CAPTURABLE
    assert len(caplog.records) == 1 and "g++" in caplog.text and "slower" in caplog.text
    with pytest.raises(PlatformError, match="no C\\+\\+ compiler"):
        cpu_ops()


def test_a_failing_compiler_is_named(broken, caplog, tmp_path):
    fake = tmp_path / "c++"
    fake.write_text("#!/bin/sh\necho 'fatal error: no luck' >&2\nexit 1\n")
    fake.chmod(0o755)
    broken.setenv("CXX", str(fake))
    assert default_ops() is CAPTURABLE
    assert "fatal error: no luck" in caplog.text
    broken.setenv("CXX", "no-such-compiler")
    with pytest.raises(PlatformError, match="no-such-compiler"):
        cpu_build.build()


def test_an_unwritable_cache_is_refused(broken, tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    broken.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(PlatformError, match="cannot write"):
        cpu_build.build()


def test_switched_off(monkeypatch):
    monkeypatch.setenv("DSV4_CPU_KERNELS", "0")
    assert default_ops() is CAPTURABLE


def test_a_second_build_is_the_first_one(broken, tmp_path):
    """Two processes at once: both get a whole library, one file remains."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-dM*) echo macros;; *) shift $(($# - 1)); sleep 0.2; echo built > "$1";; esac\n'
    )
    compiler.chmod(0o755)
    broken.setenv("CXX", str(compiler))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        paths = set(pool.map(lambda _: cpu_build.build(), range(4)))
    assert len(paths) == 1 and paths.pop().read_text() == "built\n"
    assert [p.suffix for p in cpu_build.cache_dir().iterdir()] == [".so"]
    assert cpu_build.build(("-g",)) != cpu_build.build()


def test_every_operator_has_one_kernel():
    made = {op._schema.name.removeprefix("dsv4::") for op in KERNELS}
    assert made == set(op_names()) | {"linear_int8", "moe_int8"}
    assert CALL.size == CALL_DTYPE.itemsize and CALL_DTYPE["ptr"].shape == (POINTERS,)


def step(x, w, q, pool, slots, positions, turn):
    """A toy step: products, an in-place write, an operator of several outputs."""
    y = CPU.linear(x, w)
    z = CPU.linear(y[:, 2:10], q, 2)
    pool = CPU.scatter(pool, slots, z)
    ids, weights = CPU.route(z, w[:, :6].contiguous(), w[:, 0].contiguous(), positions, 2, 1.5)
    return CPU.rope(z.unsqueeze(1), turn, None, 1e-6, torch.bfloat16), ids, weights, pool


def step_inputs():
    torch.manual_seed(0)
    quant = QuantWeight(values=torch.randint(-127, 128, (6, 8), dtype=torch.int8), scale=torch.rand(6))
    slots = torch.tensor([4, 1, 2], dtype=I32)
    return torch.randn(3, 8), torch.randn(12, 8), quant, torch.zeros(7, 6), slots, slots, torch.rand(3, 4)


def test_a_traced_call_is_one_opaque_node():
    x, w, quant, *rest = step_inputs()

    def fn(x, w, values, scale, *rest):
        return step(x, w, QuantWeight(values=values, scale=scale), *rest)

    args = (x, w, quant.values, quant.scale, *rest)
    graph = make_fx(fn, tracing_mode="fake")(*args)
    names = [
        node.target._schema.name for node in graph.graph.nodes if node.op == "call_function" and node.target in KERNELS
    ]
    assert names == ["dsv4::linear", "dsv4::linear_int8", "dsv4::scatter", "dsv4::route", "dsv4::rope"]
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in KERNELS:
            value = node.meta.get("val")
            outs = value if isinstance(value, (tuple, list)) else () if value is None else (value,)
            given = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in node.args]
            launch = KERNELS[node.target].pack(given, outs)
            assert all(isinstance(i, (int, bool)) for i in launch.ints)
    with FakeTensorMode() as mode:
        fakes = fn(*(mode.from_tensor(a) for a in args))
    for fake, real in zip(fakes, fn(*args), strict=True):
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_torch_accepts_the_operators():
    x, w, quant, pool, slots, _, turn = step_inputs()
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.dsv4.linear.default, (x, w), test_utils=tests)
    torch.library.opcheck(torch.ops.dsv4.linear_int8.default, (x, quant.values, quant.scale, 2), test_utils=tests)
    torch.library.opcheck(torch.ops.dsv4.scatter.default, (pool, slots, torch.ones(3, 6)), test_utils=tests)
    torch.library.opcheck(torch.ops.dsv4.taps.default, ([torch.ones(3, 4, 8)] * 2,), test_utils=tests)
    torch.library.opcheck(
        torch.ops.dsv4.rope.default, (x.unsqueeze(1), turn, None, None, torch.bfloat16), test_utils=tests
    )


def test_layouts_a_kernel_cannot_read_are_refused_by_name():
    with pytest.raises(TypeError, match=r"contiguous dimensions from 1 on, got shape \[3, 8\]"):
        CPU.linear(torch.randn(8, 3).t(), torch.randn(4, 8))
    with pytest.raises(TypeError, match=r"float32 or torch.bfloat16, got torch.float64"):
        CPU.linear(torch.randn(3, 8).double(), torch.randn(4, 8))
    with pytest.raises(TypeError, match=r"contiguous torch.int32 tensor, got torch.int64"):
        CPU.embed(torch.arange(3), torch.randn(4, 8), 4)


def test_shapes_that_do_not_fit_are_refused():
    x, pool, slots = torch.randn(3, 8), torch.zeros(7, 6), torch.zeros(3, dtype=I32)
    with pytest.raises(TypeError, match=r"expected a tensor of shape \[4, 8\], got \[4, 7\]"):
        CPU.linear(x, torch.randn(4, 7))
    with pytest.raises(TypeError, match=r"expected a tensor of shape \[3, 6\], got \[3, 8\]"):
        CPU.scatter(pool, slots, x)
    with pytest.raises(TypeError, match="2 lines divide 3 tokens"):
        rows = torch.zeros(2, 5, dtype=I32)
        CPU.attention(x.unsqueeze(1), x, rows, None, None, None, torch.zeros(1), torch.zeros(3, 4), 1.0)


FORK = """
import os, torch
from dsv4.ops.cpu import CPU
torch.set_num_threads(2)
x, w = torch.randn(64, 256), torch.randn(512, 256)
want = CPU.linear(x, w)
child = os.fork()
if not child:
    os._exit(0 if torch.equal(CPU.linear(x, w), want) else 1)
raise SystemExit(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_computes_with_helpers_of_its_own():
    root = Path(cpu_build.__file__).parents[2]
    subprocess.run([sys.executable, "-c", FORK], check=True, cwd=root, timeout=60)


def test_many_python_threads_at_once():
    torch.manual_seed(0)
    x, w = torch.randn(64, 128), torch.randn(300, 128)
    want = CPU.linear(x, w)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: CPU.linear(x, w), range(200)):
            assert torch.equal(got, want)
