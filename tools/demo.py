"""`make demo`: from a released-format checkpoint to a completion over HTTP, on this machine's CPU, and `make serve`.

Takes the trained demo checkpoint (released source format, dsv4/demo), converts it to W8A8, starts `dsv4 serve` at K=7, asks
for one completion as the README shows with curl, prints it and stops the server. Exits 0 only if all of that worked.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "demo"
DSV4 = str(Path(sys.executable).parent / "dsv4")
SPECULATION = '{"method":"dspark","num_speculative_tokens":7}'
SOURCE = ROOT / "dsv4" / "demo"
PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"


def run(*command: str) -> None:
    print("$ dsv4 " + " ".join(command), flush=True)
    subprocess.run([DSV4, *command], check=True, cwd=ROOT)


def size(folder: Path) -> str:
    total = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    return f"{total / 1e6:.1f} MB"


def prepare() -> Path:
    """The W8A8 checkpoint, converted once and again when the source has changed."""
    w8a8 = WORK / "w8a8"
    if not (w8a8 / "config.json").exists() or (SOURCE / "config.json").stat().st_mtime > w8a8.stat().st_mtime:
        shutil.rmtree(w8a8, ignore_errors=True)
        run("check", str(SOURCE.relative_to(ROOT)))
        run("convert", str(SOURCE.relative_to(ROOT)), str(w8a8.relative_to(ROOT)))
    print(f"checkpoint: source {size(SOURCE)}, W8A8 {size(w8a8)}", flush=True)
    return w8a8


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_ready(server: subprocess.Popen, port: int, seconds: float = 180.0) -> float:
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with code {server.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return time.monotonic() - began
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit(f"the server was not ready after {seconds:.0f} s")


def complete(port: int) -> None:
    body = {"prompt": PROMPT, "max_tokens": 96}
    url = f"http://127.0.0.1:{port}/v1/completions"
    print(f"$ curl {url} -H 'Content-Type: application/json' -d '{json.dumps(body)}'", flush=True)
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.load(response)
    seconds = time.monotonic() - began
    print(json.dumps(answer, indent=2, ensure_ascii=False))
    print(PROMPT + answer["choices"][0]["text"])
    tokens = answer["usage"]["completion_tokens"]
    drafted = answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    print(f"{drafted} of {tokens} tokens were drafted and right")
    print(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", action="store_true", help="serve until interrupted instead of one completion")
    own, flags = parser.parse_known_args()
    model = prepare()
    command = [DSV4, "serve", "--model", str(model), "--served-model-name", "demo", "--speculative-config", SPECULATION]
    if own.serve:
        os.execv(DSV4, [*command, *flags])
    port = free_port()
    server = subprocess.Popen([*command, "--port", str(port), *flags])
    try:
        print(f"server ready after {wait_ready(server, port):.1f} s", flush=True)
        complete(port)
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=60)
    print(f"server stopped, exit code {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
