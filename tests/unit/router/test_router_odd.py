"""Requests that nobody means: every one is answered in OpenAI's shape, or as any other, and none is the router's own failure."""

import asyncio
import json

import pytest
from router_fakes import PATIENCE, pair, routed, run

from kvxfer.router.conversations import Conversations
from kvxfer.router.limits import owner_of
from kvxfer.router.merge import StreamMerger, merge_answers
from kvxfer.router.openai import ApiError, event_error
from kvxfer.router.settings import RouterSettings
from kvxfer.router.split import read_request

HEADERS = [b"Authorization", b"X-Conversation-Id", b"traceparent", b"tracestate", b"X-Request-Id", b"Content-Type"]
VALUES = [b"Bearer \xff\xfe", "Bearer schlüssel".encode(), b"", b"a" * 4000, b"\t x \t", b"00-\xc3-\x28"]


async def asked(router, raw):
    """Send bytes; the status and the body of what is answered."""
    host, port = router.base.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(raw)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
    lower = head.lower()
    if b"content-length: " in lower:
        body = await reader.readexactly(int(lower.split(b"content-length: ")[1].split(b"\r\n")[0]))
    else:
        body = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), PATIENCE)
    writer.close()
    return int(head.split()[1]), body


def post(body, *headers):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body)
    return head + b"".join(header + b"\r\n" for header in headers) + b"\r\n" + body


@pytest.mark.parametrize("stream", [False, True])
def test_whatever_bytes_a_header_has_they_reach_the_engines_as_they_are_or_not_at_all(stream):
    async def main():
        p, d = pair()
        body = json.dumps({"model": "m", "prompt": "x", "stream": stream}).encode()
        async with routed([p], [d]) as router:
            for name in HEADERS:
                for value in VALUES:
                    before = len(d.calls)
                    status, answer = await asked(router, post(body, name + b": " + value))
                    assert status == 200, (name, value, answer)
                    assert len(d.calls) == before + 1
                    if name in {b"Authorization", b"traceparent", b"tracestate"}:
                        for call in (d.calls[-1], p.calls[-1]):
                            got = call.headers[name.decode()].encode(errors="surrogateescape")
                            assert got == value.strip(), (name, value)

    run(main())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"1e999",
        b"{",
        b'"x"',
        b"\xff\xfe",
        b"{}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": null}',
        b'{"prompt": {}}',
        b'{"prompt": [[]]}',
        b'{"prompt": [1, "a"]}',
        b'{"prompt": [true]}',
        b'{"prompt": "x", "n": 1e9}',
        b'{"prompt": "x", "n": 99999999999999999999}',
        b'{"prompt": "x", "n": -1}',
        b'{"prompt": ["x", "y"], "n": ' + b"9" * 4300 + b"}",
        b'{"prompt": "x", "n": 2, "seed": ' + b"9" * 4300 + b"}",
        b'{"prompt": "x", "n": true}',
        b'{"prompt": "x", "stream": "yes"}',
        b'{"prompt": "x", "seed": "1"}',
        b'{"prompt": "x", "stream_options": []}',
        b'{"prompt": "x", "conversation_id": 7}',
        b'{"prompt": "x", "best_of": 2}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000,
    ],
    ids=lambda body: body[:32].decode("latin-1"),
)
def test_a_body_that_is_none_is_a_400_that_asks_no_engine(body):
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            status, answer = await asked(router, post(body))
            error = json.loads(answer)["error"]
            assert (status, error["code"]) == (400, 400), answer
            assert error["message"]
            assert not p.calls
            assert not d.calls

    run(main())


def test_fields_that_nobody_knows_and_numbers_at_their_ends_are_the_engines_to_judge():
    async def main():
        p, d = pair()
        async with routed([p], [d]) as router:
            for more in (
                {"max_tokens": 2**62}, {"temperature": 1e308}, {"new": {"deep": [[[]]]}}, {"prompt": ""}, {"user": "\u0000"},
                {"prompt": [0] * 20_000}, {"seed": 2**63}, {"stop": ["\n"] * 100},
            ):  # fmt: skip
                assert (await router.json(**({"prompt": "x"} | more)))[0] == 200, more
                sent = {"model": "the-model", "prompt": "x"} | more
                assert sent.items() <= d.calls[-1].body.items()

    run(main())


@pytest.mark.parametrize("path", [b"GET /v1/models", b"POST /tokenize", b"GET /admin/engines"])
def test_what_a_general_client_cannot_pass_on_is_a_400_naming_the_header(path):
    async def main():
        p, d = pair()
        async with routed([p], [d], admin_key="k") as router:
            raw = path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nAuthorization: Bearer \xff\r\n\r\n"
            status, answer = await asked(router, raw)
            assert status == (401 if b"admin" in path else 400), answer
            assert b"admin" in path or b"the header Authorization has bytes that are not UTF-8" in answer

    run(main())


def test_keys_that_differ_in_no_utf8_byte_are_different_owners():
    made = [owner_of(value) for value in ("Bearer \udcff", "Bearer \udcfe", "Bearer ?", "Bearer \xff")]
    assert len(set(made)) == 4


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"[" * 100_000, b'{"role": [], "url": "http://h:1"}', b'{"role": {}}', b'{"role": "decode", "url": []}',
        b'{"role": "decode", "url": "h:x"}', b'{"role": "decode", "url": "http://h:99999"}',
        b'{"role": "decode", "url": "http://" }',
    ],
    ids=lambda body: body[:40].decode(),
)  # fmt: skip
def test_whatever_the_admin_api_is_told_is_a_400(body):
    async def main():
        p, d = pair()
        async with routed([p], [d], admin_key="k") as router:
            for call in (b"POST /admin/engines", b"DELETE /admin/engines", b"POST /admin/drain"):
                head = call + b" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\nContent-Length: %d\r\n\r\n"
                status, answer = await asked(router, head % len(body) + body)
                assert status == 400, (call, answer)

    run(main())


@pytest.mark.parametrize(
    "said",
    [
        b"[" * 100_000, b"7", b'{"choices": ["x"]}', b'{"choices": {"a": 1}}', b'{"choices": 7}', b'{"choices": [[]]}',
        b'{"choices": [], "usage": [1]}', b'{"choices": [], "usage": {"prompt_tokens": "1"}}',
        b'{"choices": [], "usage": {"completion_tokens": {}}}', b'{"choices": [{"text": "\xff"}]}',
    ],
    ids=lambda said: said[:40].decode("latin-1"),
)  # fmt: skip
def test_what_an_engine_says_and_cannot_be_merged_is_the_engines_failure(said):
    request = read_request("/v1/completions", b'{"prompt": "x", "n": 2}', 8)
    with pytest.raises(ApiError) as failed:
        merge_answers(request, [b'{"choices": []}', said])
    assert (failed.value.status, str(failed.value)[:11]) == (502, "decode leg:")
    merger = StreamMerger(request)
    with pytest.raises(ApiError) as failed:
        merger.add(request.singles[0], [b"data: " + said])
    assert (failed.value.status, str(failed.value)[:11]) == (502, "decode leg:")


def test_an_error_event_that_nobody_can_read_ends_no_connection_by_surprise():
    assert event_error(b'data: {"error":' + b"[" * 100_000) is None


def test_secrets_may_have_any_bytes():
    odd = "\udcff"
    settings = RouterSettings(prefill=("http://a:1",), decode=("http://b:1",), conversation_secret=odd)
    assert Conversations(settings, None, None)._digest(b"id", "", "x")
