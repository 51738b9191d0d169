"""`dsv4 serve` over several ranks: answers, reports, and leaves neither process, port nor file behind, however it ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from serving.tokenizer import Tokenizer
from tests.e2e.conftest import wait_until
from tests.support.engines import K7
from tests.support.ranks import Alone, make_checkpoint

pytestmark = pytest.mark.multirank


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("ranks") / "tiny")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(model: Path, temporary: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """The server's URL once it is healthy, and its process; `temporary` takes all its temporary files."""
    port = free_port()
    process = subprocess.Popen(
        [Path(sys.executable).parent / "dsv4", "serve", "--model", str(model), "--dtype", "float32", "--platform", "cpu",
         "--max-num-seqs", "4", "--max-model-len", "512", "--port", str(port), *flags],
        stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(temporary)},
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            assert process.poll() is None, process.stderr.read()
            return False

    try:
        assert wait_until(is_up, 300)
        yield url, process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def workers(temporary: Path) -> list[int]:
    """Living worker processes whose folder lies in `temporary`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes() if entry.name.isdecimal() else b""
            if all(word in command for word in (str(temporary).encode(), b"serving.rank_worker")):
                found.append(int(entry.name))
        except OSError:  # gone in the meantime
            continue
    return found


def complete(url: str, ids: list[int], count: int) -> httpx.Response:
    body = {"prompt": ids, "max_tokens": count, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120)


def test_a_rank_that_cannot_start_is_named(model: Path, tmp_path: Path) -> None:
    """Rank, device and cause in one line; exit code 1; nothing left."""
    broken, temporary = tmp_path / "broken", tmp_path / "tmp"
    temporary.mkdir()
    broken.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (broken / file.name).symlink_to(file)
    done = subprocess.run(
        [Path(sys.executable).parent / "dsv4", "serve", "--model", str(broken), "--dtype", "float32", "--platform", "cpu",
         "--tp", "2", "--ep", "2", "--devices", "4,5"],
        stderr=subprocess.PIPE, text=True, timeout=120, env=os.environ | {"TMPDIR": str(temporary)},
    )  # fmt: skip
    assert done.returncode == 1
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith("error: rank ") and "(cpu device " in error and str(broken) in error
    assert not workers(temporary) and not list(temporary.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_nothing_is_left(model: Path, tmp_path: Path, end: str) -> None:
    """Also where the engine process is killed: its workers see that and tidy up."""
    with serving(model, tmp_path, "--tp", "2", "--ep", "2") as (url, process):
        assert len(workers(tmp_path)) == 2
        assert complete(url, [5, 6, 7], 4).status_code == 200
        process.send_signal(getattr(signal, end))
        code = process.wait(timeout=120)
        assert code == (-signal.SIGKILL if end == "SIGKILL" else 0)
        assert wait_until(lambda: not workers(tmp_path), 60)
        assert wait_until(lambda: not list(tmp_path.iterdir()), 60), list(tmp_path.iterdir())
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health")
    assert not list(Path("/dev/shm").glob("*dsv4*"))


@pytest.mark.slow
def test_the_documented_layout(model: Path, tmp_path: Path) -> None:
    """Eight ranks on this machine's cores, K = 7: tokens of one process; a killed rank is named by health and replaced."""
    flags = ["--dp", "2", "--tp", "4", "--ep", "8", "--devices", "0,1,2,3,4,5,6,7", "--speculative-config", K7]
    ids = list(range(30, 60))
    with serving(model, tmp_path, *flags) as (url, process):
        expected = complete(url, ids, 12)
        assert expected.json()["choices"][0]["text"] == Tokenizer.load(model).decode(Alone(model)(ids, 12))
        victim = workers(tmp_path)[3]
        os.kill(victim, signal.SIGKILL)

        def health() -> httpx.Response:
            return httpx.get(f"{url}/health", timeout=30)

        assert wait_until(lambda: health().status_code == 503)
        assert "was killed by SIGKILL" in health().json()["message"]
        refused = complete(url, ids, 12)
        assert refused.status_code == 503 and "Retry-After" in refused.headers
        assert wait_until(lambda: health().status_code == 200, 300)
        assert complete(url, ids, 12).json()["choices"] == expected.json()["choices"]
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        log = process.communicate(timeout=120)[1]
        assert process.returncode == 0 and time.monotonic() - began < 30
    assert "8 processes, each" in log and "restarting all ranks, attempt 1 of 3" in log
    assert not workers(tmp_path) and not list(tmp_path.iterdir())
