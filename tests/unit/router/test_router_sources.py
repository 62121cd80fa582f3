"""Engines that are named by a file, by a name, or by hand: they come, drain and go while the router runs."""

import asyncio
import json
import socket
import ssl
import subprocess

import pytest
from router_fakes import FakeEngine, pair, routed, run
from yarl import URL

from kvxfer.errors import ConfigError
from kvxfer.router.settings import Role, RouterSettings
from kvxfer.router.sources import read_engines


def started(count):
    return (
        [FakeEngine("kv_producer", f"p{n}") for n in range(count)],
        [FakeEngine("kv_consumer", f"d{n}") for n in range(count)],
    )


async def until(condition):
    for _ in range(1000):
        if await condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never was so")


async def engines_of(router):
    return {one["url"]: one for one in (await router.health())[1]["engines"]}


def test_a_watched_file_names_engines_and_nonsense_in_it_changes_nothing(tmp_path):
    file = tmp_path / "engines.json"

    def write(text):
        new = tmp_path / "new"
        new.write_text(text)
        new.replace(file)

    async def main():
        ps, ds = started(2)
        for one in (*ps, *ds):
            await one.start()
        write(json.dumps({"prefill": [ps[0].url], "decode": [ds[0].url]}))
        async with routed([], [], wait=False, engines_file=str(file)) as router:
            await router.until(200, url=ps[0].url)
            write(json.dumps({"prefill": [ps[1].url + "/"], "decode": [ds[0].url, ds[1].url]}))
            await router.until(200, url=ps[1].url, healthy=True)
            await router.until(200, url=ds[1].url, healthy=True)
            assert set(await engines_of(router)) == {ps[1].url, ds[0].url, ds[1].url}
            for nonsense in ("{", "[]", '{"prefil": []}', '{"prefill": "x"}', '{"decode": ["x"]}'):
                write(nonsense)
                await asyncio.sleep(1.1)
            assert set(await engines_of(router)) == {ps[1].url, ds[0].url, ds[1].url}
            file.unlink()
            await asyncio.sleep(1.1)
            assert (await router.json(prompt="x"))[0] == 200
        for one in (*ps, *ds):
            await one.stop()

    run(main())


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"x": []}', b'{"prefill": [1]}', b'{"prefill": ["ftp://x"]}', b"\xff"])
def test_what_a_file_may_not_be(raw):
    with pytest.raises(ConfigError):
        read_engines(raw)


def test_what_a_file_may_be():
    assert read_engines(b'{"prefill": ["http://a:1/"]}') == {Role.PREFILL: ["http://a:1/"], Role.DECODE: []}


def test_a_name_is_resolved_again_and_again(monkeypatch):
    """The resolver is replaced: what a name server answers is not ours to set up. Engines listen on several loopback addresses."""

    async def main():
        answers = {"prefill.test": ["127.0.0.1"], "decode.test": ["127.0.0.1", "::1"]}
        loop = asyncio.get_running_loop()
        real = loop.getaddrinfo

        async def getaddrinfo(host, port, **more):
            if host not in answers:
                return await real(host, port, **more)
            if answers[host] is None:
                raise socket.gaierror(socket.EAI_AGAIN, "try again")
            found = []
            for address in answers[host]:
                found += await real(address, port, **more)
            return found

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        p, d = pair()
        e = FakeEngine("kv_consumer", "d1")
        await p.start()
        await d.start()
        await e.start("::1", d.port)
        names = {
            "prefill_dns": f"http://prefill.test:{p.port}",
            "decode_dns": f"http://decode.test:{d.port}",
            "dns_interval": 0.05,
        }
        async with routed([], [], wait=False, **names) as router:
            await router.until(200, url=d.url, healthy=True)
            await router.until(200, url=e.url, healthy=True)
            for _ in range(4):
                assert (await router.json(prompt="x"))[0] == 200
            assert d.calls
            assert e.calls
            answers["decode.test"] = ["::1"]

            async def only_e():
                return set(await engines_of(router)) == {p.url, e.url}

            await until(only_e)
            answers["decode.test"] = None  # an outage of the name server takes nobody away
            await asyncio.sleep(0.3)
            assert await only_e()
            assert (await router.json(prompt="x"))[0] == 200
        for one in (p, d, e):
            await one.stop()

    run(main())


ADMIN = {"Authorization": "Bearer secret"}


async def admin(router, method, path, body=None, headers=ADMIN):
    async with router.session.request(method, router.base + path, json=body, headers=headers) as response:
        return response.status, await response.json()


def test_engines_are_added_drained_and_taken_away_by_hand():
    async def main():
        ps, ds = started(2)
        for one in (ps[1], ds[1]):
            await one.start()
        async with routed(ps[:1], ds[:1], admin_key="secret") as router:
            for role, one in (("prefill", ps[1]), ("decode", ds[1])):
                status, _ = await admin(router, "POST", "/admin/engines", {"role": role, "url": one.url})
                assert status == 201
                await router.until(200, url=one.url, healthy=True)

            async def introduced():
                return bool(ds[1].introductions)

            await until(introduced)
            ds[0].hold.clear()
            held = []
            while not ds[0].calls:
                held.append(asyncio.ensure_future(router.json(prompt="x")))
                await asyncio.sleep(0.02)
            status, entry = await admin(router, "POST", "/admin/drain", {"role": "decode", "url": ds[0].url})
            assert (status, entry["draining"]) == (200, True)
            assert entry["requests"] >= 1
            before = len(ds[0].calls)
            for _ in range(4):
                assert (await router.json(prompt="x"))[0] == 200
            assert len(ds[0].calls) == before
            ds[0].hold.set()
            assert {answer[0] for answer in await asyncio.gather(*held)} == {200}, (
                "what runs on a drained engine goes on"
            )
            _, listed = await admin(router, "GET", "/admin/engines")
            (entry,) = (one for one in listed["engines"] if one["url"] == ds[0].url)
            assert (entry["requests"], entry["named_by"]) == (0, ["flags"])
            status, _ = await admin(router, "DELETE", "/admin/engines", {"role": "decode", "url": ds[0].url})
            assert status == 200
            assert ds[0].url not in await engines_of(router)
            assert (await router.json(prompt="x"))[0] == 200
            status, _ = await admin(
                router, "POST", "/admin/drain", {"role": "decode", "url": ds[1].url, "draining": True}
            )
            assert (await router.json(prompt="x"))[0] == 503
            await admin(router, "POST", "/admin/drain", {"role": "decode", "url": ds[1].url, "draining": False})
            assert (await router.json(prompt="x"))[0] == 200
        for one in (ps[1], ds[1]):
            await one.stop()

    run(main())


def test_the_admin_api_is_for_those_with_the_key_and_says_what_is_wrong():
    async def main():
        p, d = pair()
        async with routed([p], [d], admin_key="secret") as router:
            for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "secret"}, {"x-api-key": "secret"}):
                for method, path in (
                    ("GET", "/admin/engines"), ("POST", "/admin/engines"), ("DELETE", "/admin/engines"), ("POST", "/admin/drain"),
                ):  # fmt: skip
                    status, body = await admin(router, method, path, {"role": "decode", "url": d.url}, headers)
                    assert (status, body["error"]["type"]) == (401, "AuthenticationError")
            for body, status in (
                ([], 400), ({}, 400), ({"role": "x", "url": d.url}, 400), ({"role": "decode"}, 400),
                ({"role": "decode", "url": "nonsense"}, 400),
            ):  # fmt: skip
                assert (await admin(router, "POST", "/admin/engines", body))[0] == status
            assert (await admin(router, "POST", "/admin/drain", {"role": "decode", "url": "http://x:1"}))[0] == 404
            wrong = {"role": "decode", "url": d.url, "draining": 1}
            assert (await admin(router, "POST", "/admin/drain", wrong))[0] == 400
        async with routed([p], [d]) as router:
            status, body = await admin(router, "GET", "/admin/engines")
            assert status == 403
            assert "KVXFER_ADMIN_KEY" in body["error"]["message"]

    run(main())


def test_a_router_may_start_with_no_engine_if_somebody_can_name_one():
    for others in (
        {"engines_file": "x"},
        {"admin_key": "k"},
        {"prefill_dns": "http://a:1", "decode_dns": "http://b:1"},
    ):
        RouterSettings(**others)
    for others in ({}, {"prefill_dns": "http://a:1"}, {"prefill": ("http://a:1",)}):
        with pytest.raises(ConfigError, match=r"no (prefill|decode) engine"):
            RouterSettings(**others)


def test_engines_behind_tls(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-keyout", key,
         "-out", certificate, "-subj", "/CN=engine", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def main():
        from aiohttp import web

        from kvxfer.router.parts import serve

        p, d = pair()
        await p.start()
        await d.start()
        urls = {}
        for one in (p, d):
            site = web.TCPSite(one.runner, "127.0.0.1", 0, ssl_context=context)
            await site.start()
            urls[one] = f"https://localhost:{one.runner.addresses[1][1]}"
        import aiohttp
        from router_fakes import Router

        for ca, status in ((str(certificate), 200), (None, 503)):
            settings = RouterSettings(prefill=(urls[p],), decode=(urls[d],), port=0, check_interval=0.05, engine_ca=ca)
            async with serve(settings) as port, aiohttp.ClientSession() as session:
                router = Router(port, session)
                if ca:
                    await router.until(200, url=urls[d], healthy=True)
                    await router.until(200, url=urls[p], healthy=True)
                    assert (await router.events(prompt="x"))[-1] == "[DONE]"
                else:
                    await asyncio.sleep(0.3)
                assert (await router.json(prompt="x"))[0] == status
        with pytest.raises(ConfigError, match="--engine-ca"):
            async with serve(RouterSettings(prefill=(urls[p],), decode=(urls[d],), port=0, engine_ca="/nowhere")):
                pass
        await p.stop()
        await d.stop()

    run(main())


def test_an_engine_belongs_as_long_as_somebody_names_it():
    async def main():
        import aiohttp

        from kvxfer.router.engines import Engines

        async with aiohttp.ClientSession() as session:
            engines = Engines(RouterSettings(prefill=("http://a:1",), decode=("http://b:1",)), session)
            a = engines.find(Role.PREFILL, "http://a:1/")
            engines.wanted("file", {Role.PREFILL: ["http://a:1", "http://c:1"]})
            assert engines.origins(a) == ["file", "flags"]
            engines.wanted("file", {})
            assert [one.name for one in engines] == ["http://a:1", "http://b:1"]
            assert not engines.remove(a, "somebody else")
            assert engines.remove(a)
            assert engines.find(Role.PREFILL, "http://a:1") is None
            assert a.url == URL("http://a:1")

    run(main())
