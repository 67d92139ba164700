"""The web page in headless Chromium, driven over its DevTools protocol, against a server with real records and no model."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from twinkle_client import TwinkleClient
from twinkle_server import Service, create_app, parse_config
from twinkle_server._keys import create_key
from twinkle_server.store import Checkpoint, Run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian: apt-get install chromium)"),
]
HOSTILE = "<img src=x onerror=document.title='owned'>"


class Browser:
    """A page of headless Chromium. Commands and events travel over two pipes (--remote-debugging-pipe), as JSON that ends with a null byte."""

    def __init__(self, folder: Path) -> None:
        reads, self._to = os.pipe()
        self._from, writes = os.pipe()
        flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-extensions --remote-debugging-pipe"
        command = f"exec {CHROMIUM} {flags} --user-data-dir={folder} about:blank 3<&{reads} 4>&{writes}"
        self._process = subprocess.Popen(["bash", "-c", command], pass_fds=(reads, writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(reads)
        os.close(writes)
        os.set_blocking(self._from, False)
        self._rest, self._number, self._session = b"", 0, None
        self.urls: list[str] = []
        self.problems: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": self._session} if self._session else {})
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 60
        while True:
            answer = self._next(end)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert time.monotonic() < end, "Chromium does not answer"
            assert self._process.poll() is None, "Chromium has ended"
            try:
                self._rest += os.read(self._from, 1 << 20)
            except BlockingIOError:
                time.sleep(0.01)
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        if message.get("method") == "Network.requestWillBeSent":
            self.urls.append(message["params"]["request"]["url"])
        if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.problems.append(json.dumps(message["params"]))
        return message

    def run(self, script: str) -> Any:
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, script: str, timeout_s: float = 30) -> None:
        end = time.monotonic() + timeout_s
        while not self.run(script):
            assert time.monotonic() < end, f"{script} does not come about; the page shows: {self.run('document.body.innerText')}; {self.problems}"
            time.sleep(0.05)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && !!document.getElementById('key')")

    def log_in(self, key: str) -> None:
        self.run("document.getElementById('key').focus()")
        self.send("Input.insertText", text=key)
        self.run("document.querySelector('#login button').click()")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._to)
        os.close(self._from)


class Served:
    """A server with one tenant's run, checkpoint and session, and a run of another tenant."""

    def __init__(self, folder: Path) -> None:
        self.service = Service(parse_config({"data_dir": str(folder)}))
        store = self.service.store
        _, self.key = create_key(store, "alice")
        now = time.time()
        for name, tenant, label in (("run-1", "alice", HOSTILE), ("run-2", "bob", "")):
            store.add(Run(id=name, tenant=tenant, base_model="org/tiny", adapter=name, lora={"r": 8}, label=label, created_at=now, used_at=now))
        for step in range(5):
            store.add_metrics([("run-1", step, {"loss": 2.0 / (step + 1)})])
        checkpoint = Checkpoint(
            run_id="run-1",
            tenant="alice",
            kind="weights",
            name="first",
            folder="f",
            size_bytes=3 << 20,
            digest="",
            step=5,
            resumable=True,
            created_at=now,
        )
        store.add(checkpoint)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        app = create_app(self.service.config, self.service)
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="error"))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve()), daemon=True)
        self._thread.start()
        end = time.monotonic() + 60
        while not self._server.started:
            assert time.monotonic() < end, "the server does not start"
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("page-server"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    page = Browser(tmp_path_factory.mktemp("chromium"))
    yield page
    page.close()


@pytest.fixture(autouse=True)
def fresh(browser: Browser, served: Served) -> None:
    browser.open(served.url)
    browser.run("sessionStorage.clear()")
    browser.open(served.url)
    browser.urls.clear()
    browser.problems.clear()


def test_it_shows_what_the_key_may_see_and_follows_it(browser: Browser, served: Served) -> None:
    assert browser.run("document.getElementById('content').hidden") is True
    with TwinkleClient(served.url, served.key, session_metadata={"user": "alice"}):
        browser.log_in(served.key)
        browser.until("document.querySelectorAll('.run').length === 1 && document.querySelector('.run').innerText.includes('step 4')")
        text = browser.run("document.body.innerText")
        for told in ("run-1", "org/tiny", "rank 8", "loss 0.40000 at step 4", "0 of 0 adapters", '{"user":"alice"}', HOSTILE):
            assert told in text, told
        assert "run-2" not in text
        assert browser.run("document.querySelector('.run polyline').getAttribute('points').split(' ').length") == 5
        assert browser.run("document.querySelector('.run svg').getBoundingClientRect().height") > 50
        # Live: a new point appears by itself.
        served.service.store.add_metrics([("run-1", 5, {"loss": 0.125})])
        browser.until("document.querySelector('.run').innerText.includes('loss 0.12500 at step 5')")
        browser.run("document.querySelector('.run summary').click()")
        browser.until("document.querySelector('.run').innerText.includes('twinkle://run-1/weights/first')")
        assert "3.0 MiB" in browser.run("document.querySelector('.run').innerText")
    # What tenants write is text.
    assert browser.run("document.title") == "Twinkle"
    assert browser.run("document.querySelectorAll('#runs img').length") == 0
    # The key is in this tab only, and nobody else is asked for anything.
    assert browser.run("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
    assert browser.urls
    assert all(url.startswith((served.url, "data:")) for url in browser.urls), browser.urls
    assert not browser.problems
    browser.run("document.getElementById('forget').click()")
    assert browser.run("[sessionStorage.length, document.getElementById('content').hidden, document.querySelectorAll('.run').length]") == [0, True, 0]


def test_a_wrong_key_is_refused_and_forgotten(browser: Browser, served: Served) -> None:
    browser.log_in("wrong")
    browser.until("!document.getElementById('refused').hidden")
    assert "does not know this key" in browser.run("document.getElementById('refused').innerText")
    assert browser.run("sessionStorage.length") == 0


def test_it_fits_a_phone(browser: Browser, served: Served) -> None:
    browser.send("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    try:
        browser.open(served.url)
        browser.log_in(served.key)
        browser.until("document.querySelectorAll('.run').length === 1")
        assert browser.run("document.documentElement.scrollWidth") <= 360
        assert (
            browser.run("Math.min(...[...document.querySelectorAll('button, summary')].filter(e => e.offsetParent).map(e => e.offsetHeight))") >= 44
        )
        assert browser.run("document.querySelector('.run').getBoundingClientRect().right") <= 360
        browser.run("document.querySelector('.run summary').click()")
        browser.until("document.querySelectorAll('.run td').length === 3")
        # Words, times and sizes stay whole; only identities and paths break. What does not fit scrolls in its own box.
        short = (
            "[...document.querySelectorAll('th, td:not(.long)')].filter(e => e.offsetParent && (e.tagName === 'TD' || !e.innerText.includes(' ')))"
        )
        lines = "(e => { const range = document.createRange(); range.selectNodeContents(e); return range.getClientRects().length; })"
        assert browser.run(f"{short}.map({lines})") in ([1] * number for number in range(8, 20))
        assert browser.run("document.documentElement.scrollWidth") <= 360
    finally:
        browser.send("Emulation.clearDeviceMetricsOverride")
