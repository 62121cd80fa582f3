"""The page in a real browser: headless Chromium, driven over its DevTools protocol, against a router with traffic."""

import asyncio
import base64
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

import aiohttp
import pytest
from router_fakes import FakeEngine, run

NAMES = ("chromium-headless-shell", "chromium", "google-chrome", "chrome")
CHROMIUM = os.environ.get("KVXFER_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
CACHE = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0\nvllm:kv_cache_usage_perc{engine="0"} 0.4'

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium: install chromium-headless-shell, or name one in KVXFER_CHROMIUM"
)


class Tab:
    """One page of a browser."""

    def __init__(self, socket):
        self._socket = socket
        self._number = 0
        self.complaints = []

    async def call(self, method, **params):
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = json.loads(await self._socket.receive_str(timeout=30))
            if message.get("method") in {"Runtime.exceptionThrown", "Log.entryAdded"}:
                self.complaints.append(message["params"])
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]

    async def run(self, script):
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, script):
        for _ in range(300):
            if await self.run(script):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"never true: {script}; the page says {await self.run('document.body.innerText')!r}")


class Browser:
    async def __aenter__(self):
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process = await asyncio.create_subprocess_exec(
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--window-size=1200,900",
            f"--user-data-dir={self._home.name}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        told = Path(self._home.name) / "DevToolsActivePort"
        for _ in range(600):
            if told.exists() and "\n" in told.read_text():
                break
            assert self._process.returncode is None, "Chromium ended"
            await asyncio.sleep(0.05)
        base = "127.0.0.1:" + told.read_text().splitlines()[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://{base}/json/list") as response:
            (page,) = (one for one in await response.json() if one["type"] == "page")
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=1 << 28)
        tab = Tab(self._socket)
        for domain in ("Page", "Runtime", "Log"):
            await tab.call(f"{domain}.enable")
        return tab

    async def __aexit__(self, *_error):
        await self._session.close()
        os.killpg(self._process.pid, signal.SIGKILL)  # with its helpers
        await self._process.wait()
        self._home.cleanup()


def test_the_page_shows_engines_load_and_a_waterfall(tmp_path):
    async def main():
        from router_fakes import routed

        ps = [FakeEngine("kv_producer", f"p{n}", port=str(5600 + n)) for n in range(2)]
        ds = [FakeEngine("kv_consumer", f"d{n}", port=str(5700 + n)) for n in range(2)]

        async def takes_time(call, request):
            await asyncio.sleep(0.1 if call.params.get("do_remote_prefill") else 0.05)

        ds[0].info["leg_timeout"] = "45"
        for one in ds:
            one.more_info = CACHE
        for one in (*ps, *ds):
            one.behave = takes_time
        async with routed(ps, ds) as router, Browser() as tab:
            for number in range(6):
                assert (await router.events(prompt="x" * 400, conversation_id=f"c{number % 2}"))[-1] == "[DONE]"
            evil = "<img src=x onerror=alert(1)>"
            ds[1].info["engine_id"] = evil
            await router.until(200, engine_id=evil)
            ps[1].ok = False
            await router.until(200, url=ps[1].url, healthy=False)
            await tab.call("Page.navigate", url=router.base + "/ui")
            await tab.until("document.body !== null && document.body.dataset.ready === 'yes'")
            assert await tab.run("document.querySelectorAll('#engines tbody tr').length") == 4
            text = await tab.run("document.body.innerText")
            assert "push, decode chosen early" in text
            assert "GET /health answered 503" in text
            assert text.count("--request-timeout 20 s is not above its leg_timeout 45 s") == 1
            assert evil in text, "an engine's words are text, never markup"
            assert await tab.run("document.querySelectorAll('img').length") == 0
            assert await tab.run("document.querySelectorAll('#engines .fill i')[0].style.width") == "40%"
            assert await tab.run("document.querySelectorAll('#requests tbody tr').length") == 6
            stages = await tab.run(
                "[...document.querySelectorAll('#requests tbody tr:first-child .bar i')].map((i) => i.title)"
            )
            assert [one.split(" (")[0] for one in stages][:2] == ["router queue", "prefill"]
            assert "reuse" in await tab.run("document.querySelector('#requests tbody tr').innerText")
            assert "No handoff records of" in text
            widths = await tab.run(
                "[...document.querySelectorAll('#requests .bar')].every((b) => b.getBoundingClientRect().width > 300)"
            )
            assert widths
            shots.append(await tab.call("Page.captureScreenshot"))
            assert tab.complaints == [], tab.complaints

    shots = []
    run(main())
    picture = base64.b64decode(shots[0]["data"])
    Path(os.environ.get("KVXFER_SCREENSHOT", tmp_path / "ui.png")).write_bytes(picture)
    assert len(picture) > 10_000
