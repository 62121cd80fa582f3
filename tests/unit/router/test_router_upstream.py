"""HTTP/1.1 to engines: answers in every framing and cut anywhere, connections kept or closed, and never one that is another's."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from router_fakes import PATIENCE, run
from yarl import URL

from kvxfer.router.connection import whole_events
from kvxfer.router.relay import unframed
from kvxfer.router.upstream import BadAnswer, CannotConnect, Upstream

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n7;x=y\r\n, world\r\n0\r\n\r\n"
TRAILERS = CHUNKED[:-2] + b"X-Sum: 1\r\n\r\n"
LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\nhello, world"
INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n" + LENGTH
UNTIL_CLOSED = b"HTTP/1.0 200 OK\r\n\r\nhello, world"


class Peer:
    """A server that answers each request with the next of ``answers``: bytes, or a list of pieces to send one by one."""

    def __init__(self, answers, *, close=False):
        self.answers = list(answers)
        self.close = close
        self.requests = []
        self.connections = 0
        self.lost = asyncio.Event()

    async def __call__(self, reader, writer):
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append((head, await reader.readexactly(size)))
                answer = self.answers.pop(0)
                for piece in [answer] if isinstance(answer, bytes) else answer:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)
                if self.close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            self.lost.set()
        finally:
            writer.close()


@asynccontextmanager
async def talking(*answers, close=False, connect_timeout=5.0):
    peer = Peer(answers, close=close)
    server = await asyncio.start_server(peer, "127.0.0.1", 0)
    upstream = Upstream(connect_timeout)
    url = URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/x")
    try:
        yield peer, lambda timeout=PATIENCE: upstream.post(url, {"X-A": "b"}, b"{}", timeout)
    finally:
        upstream.close()
        server.close()


@pytest.mark.parametrize(
    "answer", [CHUNKED, TRAILERS, LENGTH, INTERIM], ids=["chunked", "trailers", "length", "interim"]
)
@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_an_answer_is_read_wherever_it_is_cut_and_its_connection_used_again(answer, step):
    async def main():
        pieces = [answer[at : at + step] for at in range(0, len(answer), step)]
        async with talking(pieces, pieces) as (peer, post):
            for _ in range(2):
                got = await post()
                assert got.status == 200
                assert await got.read() == b"hello, world"
                got.end()
            assert peer.connections == 1
            assert b"X-A: b\r\n" in peer.requests[0][0]

    run(main())


def test_an_answer_without_a_length_ends_with_its_connection():
    async def main():
        async with talking(UNTIL_CLOSED, UNTIL_CLOSED, close=True) as (peer, post):
            for count in (1, 2):
                got = await post()
                assert await got.read() == b"hello, world"
                got.end()
                assert peer.connections == count

    run(main())


@pytest.mark.parametrize("whole", [CHUNKED, LENGTH], ids=["chunked", "length"])
def test_an_answer_that_is_cut_short_anywhere_is_an_error(whole):
    async def main():
        for cut in range(len(whole) - 1):
            async with talking(whole[:cut], close=True) as (_, post):
                with pytest.raises(BadAnswer, match="before its answer was complete"):
                    await (await post()).read()

    run(main())


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n+5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0_5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 4\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\nhello",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 -20 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\n" + b"x" * 70_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 5000,
    ],
)
def test_what_is_not_http_is_an_error(answer):
    async def main():
        async with talking(answer) as (_, post):
            with pytest.raises(BadAnswer):
                await (await post()).read()

    run(main())


def test_an_answer_that_is_left_early_closes_its_connection():
    async def main():
        async with talking(CHUNKED[:70], LENGTH) as (peer, post):
            (await post()).close()
            await asyncio.wait_for(peer.lost.wait(), PATIENCE)
            assert await (await post()).read() == b"hello, world"
            assert peer.connections == 2

    run(main())


def test_closing_an_answer_late_does_not_touch_the_exchange_that_has_its_connection_now():
    async def main():
        async with talking(LENGTH, [LENGTH[:-3], LENGTH[-3:]], LENGTH) as (peer, post):
            first = await post()
            await first.read()
            first.end()
            second = await post()
            first.close()
            first.end()
            assert await second.read() == b"hello, world"
            second.end()
            second.close()
            assert await (await post()).read() == b"hello, world"
            assert peer.connections == 1

    run(main())


def test_the_rest_of_a_message_may_come_after_its_reader_has_left():
    async def main():
        async with talking([CHUNKED[:-5], b"", CHUNKED[-5:]], LENGTH) as (peer, post):
            got = await post()
            while len(await got.next()) < 5:
                pass
            got.end()
            for _ in range(100):
                await asyncio.sleep(0.005)
                if got._connection.complete:
                    break
            assert await (await post()).read() == b"hello, world"
            assert peer.connections == 1

    run(main())


def test_bytes_behind_an_answer_answer_nobody_else():
    async def main():
        async with talking(LENGTH + LENGTH, LENGTH) as (peer, post):
            got = await post()
            assert await got.read() == b"hello, world"
            got.end()
            assert await (await post()).read() == b"hello, world"
            assert peer.connections == 2

    run(main())


def test_a_time_out_is_told_at_whatever_it_strikes():
    async def main():
        async with talking([]) as (peer, post):
            with pytest.raises(asyncio.TimeoutError):
                await post(0.05)
            await asyncio.wait_for(peer.lost.wait(), PATIENCE)
        async with talking(LENGTH[:-3]) as (_, post):
            got = await post(0.05)
            with pytest.raises(asyncio.TimeoutError):
                await got.read()

    run(main())


def test_nobody_there():
    async def main():
        async with talking() as (_, post):
            pass
        with pytest.raises(CannotConnect):
            await post()

    run(main())


def test_a_reader_that_is_slow_stops_the_socket():
    async def main():
        size = 64 * 1024 * 1024
        piece = b"x" * (1024 * 1024)
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size
        async with talking([head, *[piece] * 64]) as (_, post):
            got = await post()
            await asyncio.sleep(0.3)
            assert got._connection._held < 4 * 1024 * 1024
            assert len(await got.read()) == size

    run(main())


class Taken:
    """A sink that writes down what it is given."""

    def __init__(self):
        self.seen = []
        self.over = asyncio.Event()

    def chunks(self, framed, count):
        assert unframed(framed).count(b"\n\n") == count
        self.seen.append((unframed(framed), framed))

    def body(self, data):
        self.seen.append((data, None))

    def end(self):
        assert not self.over.is_set()
        self.over.set()


def test_a_sink_gets_every_byte_once_and_frames_where_whole_events_came():
    async def main():
        one = b"8\r\ndata: \n\n\r\n"
        parts = [CHUNKED[:-5], one, b"3\r\nt", b"wo\r\n2\r\n", b"!!\r\n", one + one, one + b"4\r\n", b"ab\n\n\r\n", one]
        async with talking([*parts, b"0\r\n\r\n"]) as (_, post):
            got = await post()
            taken = Taken()
            got.relay(taken)
            await asyncio.wait_for(taken.over.wait(), PATIENCE)
            assert b"".join(body for body, _ in taken.seen) == b"hello, worlddata: \n\ntwo!!" + 3 * b"data: \n\n" + (
                b"ab\n\ndata: \n\n"
            )
            assert b"".join(framed for _, framed in taken.seen if framed).startswith(one)
            assert got.failure is None

    run(main())


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (b"3\r\na\n\n\r\n", 1),
        (b"3\r\na\n\n\r\n" * 3, 3),
        (b"2\r\n\n\n\r\n", 1),
        (b"3\r\na\n\n\r\n3\r\na\n\n\r", 0),  # cut
        (b"3\r\na\n\n\r\n3\r\nabc\r\n", 0),  # not at an event's end
        (b"4\r\na\n\n\r\n", 0),  # another length
        (b"3;x=y\r\na\n\n\r\n", 0),  # an extension: left to the reader of chunks
        (b"0\r\n\r\n", 0),
        (b"3\r\na\n\n\r\n0\r\n\r\n", 0),
        (b"-4\r\n\n\n\r\n" * 2, 0),
        (b"+3\r\na\n\n\r\n", 0),  # no client reads these, though Python does
        (b"0x3\r\na\n\n\r\n", 0),
        (b" 3\r\na\n\n\r\n", 0),
        (b"0_3\r\na\n\n\r\n", 0),
        (b"", 0),
        (b"\n\n\r\n", 0),
        (b"1" * 30, 0),
    ],
)
def test_only_whole_chunks_of_whole_events_are_passed_on_as_they_are(data, count):
    assert whole_events(data) == count


def test_a_header_cannot_carry_another():
    async def main():
        async with talking() as (_, _post):
            with pytest.raises(ValueError, match="line break"):
                await Upstream(1.0).post(URL("http://127.0.0.1:1/"), {"Authorization": "a\r\nX: y"}, b"", 1.0)

    run(main())
