"""HTTP servers that play vLLM engines: their answers are made of the prompt, so that two that get the same say the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading

from aiohttp import web


class Played:
    """An engine that answers each prompt with tokens made of it; ``delay`` before the first. Runs in a thread of its own."""

    def __init__(self, *, delay: float = 0.0, wrong: bool = False, fail: bool = False, hits: int = 0) -> None:
        self.delay, self.wrong, self.fail, self.hits = delay, wrong, fail, hits
        self.asked: list[dict] = []
        self.busy = self.most = 0

    async def complete(self, request):
        body = await request.json()
        self.asked.append(body)
        self.busy += 1
        self.most = max(self.most, self.busy)
        try:
            return await self._answer(request, body)
        finally:
            self.busy -= 1

    async def _answer(self, request, body):
        if self.fail:
            return web.json_response({"error": {"message": "no"}}, status=500)
        await asyncio.sleep(self.delay)
        made = [hash((tuple(body["prompt"]), i, self.wrong)) % 1000 for i in range(body["max_tokens"])]
        if not body["stream"]:
            params = {"do_remote_prefill": True} if body.get("kv_transfer_params") else None
            choice = {"text": "", "token_ids": made, "finish_reason": "length"}
            return web.json_response({"choices": [choice], "kv_transfer_params": params})
        response = web.StreamResponse()
        await response.prepare(request)
        for i, token in enumerate(made):
            reason = "length" if i + 1 == len(made) else None
            choice = {"text": "", "finish_reason": reason} | (
                {"token_ids": [token]} if body["return_token_ids"] else {}
            )
            event = {"choices": [choice]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"choices": [], "usage": {"completion_tokens": len(made)}}
            await response.write(f"data: {json.dumps(usage)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def page(self) -> str:
        """Return ``/metrics``."""
        return f'vllm:prefix_cache_hits_total{{engine="0"}} {self.hits * len(self.asked)}\n'

    async def metrics(self, _request):
        return web.Response(text=self.page())


@contextlib.contextmanager
def serving(*played: Played):
    """Serve each at a port of its own; hands out their URLs."""
    loop = asyncio.new_event_loop()

    async def start(one: Played):
        app = web.Application()
        app.router.add_post("/v1/completions", one.complete)
        app.router.add_get("/metrics", one.metrics)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    started = [asyncio.run_coroutine_threadsafe(start(one), loop).result(10) for one in played]
    try:
        yield [url for _, url in started]
    finally:
        for runner, _ in started:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
