"""The page at `/`, and the same page in a real browser where there is one."""

import itertools
import json
import os
import shlex
import shutil
import subprocess
import time

import pytest

from tests.support.toy_engine import ToyEngine

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def test_the_page_needs_nothing_from_elsewhere(toy_server):
    client = toy_server(ToyEngine(), api_keys=("k",))  # the page itself is open: it has no data
    response = client.get("/")
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "http" not in response.text.replace("<!doctype html>", "")
    assert client.get("/metrics/json").status_code == 401


class Browser:
    """A headless Chromium driven over its debugging pipe: JSON messages that end with a zero byte."""

    def __init__(self, binary, home):
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        command = [binary, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        line = f"exec {shlex.join([*command, f'--user-data-dir={home}', 'about:blank'])} 3<&{to_read} 4>&{to_write}"
        self._process = subprocess.Popen(
            ["bash", "-c", line], pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._ids, self._buffer, self._session = itertools.count(1), b"", None
        self.complaints = []

    def open(self, url):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)

    def call(self, method, **params):
        message = {"id": next(self._ids), "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.complaints.append(answer["params"])
            if answer.get("id") == message["id"]:
                return answer["result"]

    def _receive(self):
        while b"\0" not in self._buffer:
            data = os.read(self._in, 65536)
            assert data, "the browser ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def evaluate(self, expression):
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait(self, expression, seconds=60):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := self.evaluate(expression):
                return value
            time.sleep(0.05)
        status = self.evaluate('$("status").textContent')
        raise AssertionError(f"{expression} did not come true; status: {status}")

    def press(self, key, **fields):
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **fields)

    def close(self):
        os.close(self._out)
        os.close(self._in)
        self._process.kill()
        self._process.wait()


@pytest.fixture
def browser(tmp_path):
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    if binary is None:
        pytest.skip(f"needs one of {', '.join(BROWSERS)}")
    browser = Browser(binary, tmp_path)
    yield browser
    browser.close()


@pytest.mark.slow
def test_the_page_in_a_browser(toy_server, v4_tokenizer, browser):
    engine = ToyEngine(script=v4_tokenizer.encode("<b>Hello</b> from a drafted answer!"), steps=(4,), delay_s=0.02)
    client = toy_server(engine)
    browser.open(f"{client.base_url}/")
    browser.wait('document.activeElement?.id === "prompt" && $("model").textContent === "toy"')
    browser.call("Input.insertText", text="Hi")
    browser.press("Enter", modifiers=2, windowsVirtualKeyCode=13)
    done = browser.wait('$("status").textContent.startsWith("Done") && $("status").textContent')
    shown = len(engine.script) + 1
    assert done == f"Done: stop, {shown} tokens in {-(-shown // 4)} steps."
    assert browser.evaluate('$("answer").textContent') == "<b>Hello</b> from a drafted answer!"
    assert browser.evaluate('document.querySelectorAll("#answer b").length') == 0
    drafted = browser.evaluate('document.querySelectorAll("#answer .drafted").length')
    assert drafted == sum(at % 4 != 3 for at in range(shown))
    assert browser.wait('$("accepted").textContent !== "–" && $("cache").textContent') == "25 %"

    engine.script, engine.delay_s = None, 0.05
    browser.press("Enter", modifiers=2, windowsVirtualKeyCode=13)
    browser.wait('$("answer").children.length > 8')
    browser.press("Escape", windowsVirtualKeyCode=27)
    browser.wait('$("status").textContent.startsWith("Stopped")')
    assert browser.complaints == []


@pytest.mark.slow
def test_the_page_asks_for_a_key(toy_server, browser):
    client = toy_server(ToyEngine(), api_keys=("secret",))
    browser.open(f"{client.base_url}/")
    browser.wait('typeof $ === "function" && !$("keyrow").hidden')
    browser.evaluate('$("key").value = "secret"; $("key").dispatchEvent(new Event("change"))')
    browser.wait('$("model").textContent === "toy"')
