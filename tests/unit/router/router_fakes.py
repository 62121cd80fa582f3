"""Real HTTP servers that answer like vLLM with a kvxfer connector, record what they were sent, and misbehave on demand."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from kvxfer.bench.process import free_ports
from kvxfer.router.parts import serve
from kvxfer.router.settings import Mode, RouterSettings

PATIENCE = 10.0


def run(main, limit=60):
    """Run a test's coroutine, never for ever."""

    async def bounded():
        await asyncio.wait_for(main, limit)

    asyncio.run(bounded())


@dataclass
class Call:
    path: str
    headers: dict
    body: dict
    arrived: float
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def params(self):
        return self.body["kv_transfer_params"]


class FakeEngine:
    """One vLLM. ``behave(call, request)`` may replace an answer; ``hold`` delays all of them until it is set."""

    def __init__(self, role, engine_id, **info):
        self.role = role
        self.engine_id = engine_id
        self.info = {"host": "127.0.0.1", "port": "5600", "tp_size": "1", "pp_size": "1", "mode": "push"} | info
        self.calls: list[Call] = []
        self.probes: list[Call] = []
        self.introductions: list[list[str]] = []
        self.takes_introductions = True
        self.introduction_answered = asyncio.Event()
        self.introduction_answered.set()
        self.arrival = asyncio.Condition()
        self.behave = None
        self.hold = asyncio.Event()
        self.hold.set()
        self.ok = True
        self.has_info = True
        self.more_info = ""
        self.probe_answer: dict = {}
        self.tokens = ["a", "b", "c"]
        self.prompt_tokens = 7
        self.runner = None
        self.port = 0
        self.host = "127.0.0.1"

    @property
    def url(self):
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    async def start(self, host=None, port=None):
        self.host = host or self.host
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self.runner.setup()
        await web.TCPSite(self.runner, self.host, port or self.port).start()
        self.port = self.runner.addresses[0][1]

    async def stop(self):
        await self.runner.cleanup()

    async def called(self, count=1):
        async with self.arrival:
            await asyncio.wait_for(self.arrival.wait_for(lambda: len(self.calls) >= count), PATIENCE)
        return self.calls[count - 1]

    async def _health(self, _request):
        return web.Response(status=200 if self.ok else 503)

    async def _metrics(self, _request):
        labels = {
            "engine": "0",
            "engine_id": self.engine_id,
            "role": self.role,
            "wire": "1",
            "leg_timeout": "10",
            "model_name": 'm"q\\x',
        } | self.info
        text = ",".join(
            '{}="{}"'.format(name, value.replace("\\", "\\\\").replace('"', '\\"')) for name, value in labels.items()
        )
        lines = ["# HELP vllm:num_requests_running x", 'vllm:num_requests_running{engine="0"} 1.0']
        if self.has_info:
            lines += ["# TYPE kvxfer_info gauge", "kvxfer_info{" + text + "} 1.0", self.more_info]
        return web.Response(text="\n".join(lines) + "\n")

    async def _models(self, request):
        return web.json_response({"object": "list", "data": [{"id": "the-model", "by": self.engine_id}]})

    async def _complete(self, request):
        body = await request.json()
        call = Call(request.path, request.headers.copy(), body, asyncio.get_running_loop().time())
        params = body.get("kv_transfer_params") or {}
        if "kvxfer_peers" in params:
            assert params["kvxfer_probe"], "only a probe may name peers"
            self.introductions.append(params["kvxfer_peers"])
            await self.introduction_answered.wait()
            return self.json(call) if self.takes_introductions else web.Response(status=500)
        if params.get("kvxfer_probe"):
            self.probes.append(call)
            return self.json(call, self.coordinates() | self.probe_answer)
        self.calls.append(call)
        async with self.arrival:
            self.arrival.notify_all()
        try:
            if self.behave is not None:
                answer = await self.behave(call, request)
                if answer is not None:
                    return answer
            await self.hold.wait()
            if body.get("stream"):
                return await self.stream(call, request)
            return self.json(call, self.coordinates() if self.role == "kv_producer" else None)
        except asyncio.CancelledError:
            call.aborted.set()
            raise
        finally:
            call.ended.set()

    def coordinates(self):
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_host": self.info["host"],
            "remote_port": int(self.info["port"]),
            "tp_size": int(self.info["tp_size"]),
            "remote_block_ids": [[1, 2]],
        }

    def json(self, call, params=None):
        chat = "chat" in call.path
        text = "".join(self.tokens)
        choice = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        count = len(self.tokens)
        return web.json_response(
            {
                "id": "cmpl-" + call.headers.get("X-Request-Id", "?"),
                "object": "chat.completion" if chat else "text_completion",
                "created": 1,
                "model": "the-model",
                "choices": [choice],
                "usage": {
                    "prompt_tokens": self.prompt_tokens,
                    "completion_tokens": count,
                    "total_tokens": self.prompt_tokens + count,
                    "prompt_tokens_details": {"cached_tokens": 3},
                },
                "kv_transfer_params": params,
            }
        )

    def chunk(self, call, token, finish=None):
        chat = "chat" in call.path
        choice = {"index": 0, "finish_reason": finish}
        choice |= {"delta": {"content": token}} if chat else {"text": token}
        return {
            "id": "cmpl-" + call.headers["X-Request-Id"],
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 1,
            "model": "the-model",
            "choices": [choice],
        }

    async def begin(self, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        return response

    async def stream(self, call, request):
        response = await self.begin(request)
        for number, token in enumerate(self.tokens):
            last = number == len(self.tokens) - 1
            await response.write(event(self.chunk(call, token, "length" if last else None)))
            await asyncio.sleep(0)
        if (call.body.get("stream_options") or {}).get("include_usage"):
            count = len(self.tokens)
            usage = {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": count,
                "total_tokens": self.prompt_tokens + count,
            }
            await response.write(event(self.chunk(call, "") | {"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def event(value):
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def error_answer(status, message):
    body = {"error": {"message": message, "type": "NotFoundError", "param": "model", "code": status}}
    return web.json_response(body, status=status)


def always(make):
    """A behaviour that answers every call with a fresh response of ``make()``."""

    async def behave(call, request):
        return make()

    return behave


def free_port():
    return free_ports(1)[0]


class Router:
    """A router under test and a client of it."""

    def __init__(self, port, session, host="127.0.0.1"):
        self.session = session
        self.base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def post(self, path="/v1/completions", **body):
        return self.session.post(self.base + path, json={"model": "the-model"} | body)

    async def json(self, path="/v1/completions", **body):
        async with self.post(path, **body) as response:
            return response.status, await response.json(), response.headers

    async def events(self, path="/v1/completions", **body):
        """Every event of a stream; the last is the string [DONE] where the stream ended well."""
        async with self.post(path, stream=True, **body) as response:
            raw = await response.read()
            assert response.status == 200, raw
            assert response.content_type == "text/event-stream"
            return [read_event(part) for part in raw.split(b"\n\n") if part]

    async def health(self):
        async with self.session.get(self.base + "/health") as response:
            return response.status, await response.json()

    async def until(self, status, **engine):
        """Wait until /health has this status and an engine that looks like ``engine``."""
        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE
        while loop.time() < end:
            got, body = await self.health()
            if got == status and any(engine.items() <= one.items() for one in body["engines"]):
                return body
            await asyncio.sleep(0.01)
        raise AssertionError(f"wanted {status} {engine}, have {got} {body}")


def read_event(part):
    assert part.startswith(b"data: "), part
    data = part[len(b"data: ") :]
    return "[DONE]" if data == b"[DONE]" else json.loads(data)


@asynccontextmanager
async def routed(prefill, decode, *, wait=True, start=True, listen="127.0.0.1", **settings):
    """Start the fakes, a router in front of them, and a client."""
    settings = {
        "check_interval": 0.02,
        "check_timeout": 5.0,
        "request_timeout": 20.0,
        "stop_timeout": 0.1,
        "port": 0,
        "host": listen,
    } | settings
    settings["mode"] = Mode(settings.get("mode", "push"))
    for engine in (*prefill, *decode):
        engine.info["mode"] = settings["mode"].value
        if start:
            await engine.start()
    made = RouterSettings(prefill=tuple(e.url for e in prefill), decode=tuple(e.url for e in decode), **settings)
    try:
        async with serve(made) as port, aiohttp.ClientSession() as session:
            router = Router(port, session, listen)
            if wait:
                for engine in (*prefill, *decode):
                    await router.until(200, url=engine.url, healthy=True)
            yield router
    finally:
        for engine in (*prefill, *decode):
            if engine.runner is not None:
                await engine.stop()


def pair(**info):
    return FakeEngine("kv_producer", "p0", **info), FakeEngine("kv_consumer", "d0")
