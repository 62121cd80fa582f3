"""Two processes, real NIXL LIBFABRIC over libfabric's tcp provider: the whole path but vLLM."""

from __future__ import annotations

import pytest

pytest.importorskip("nixl", reason="NIXL is not installed")

from kvxfer.protocol.messages import WIRE_VERSION
from tests.support.peers import PeerProcess, has_ipv6

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_bytes_arrive(peers, mode) -> None:
    p, d = peers("p", mode=mode), peers("d", mode=mode)
    for i, tokens in enumerate((1, 4, 33, 200)):
        blocks = list(range(1, 1 + -(-tokens // 4)))
        mine = blocks[::-1]
        p("fill", blocks=blocks, seed=i)
        if i % 2:
            p("prefill", handoff=f"h{i}", request=f"p{i}", blocks=blocks, tokens=tokens, chunks=2)
        d("open", handoff=f"h{i}", request=f"d{i}", engine="p", port=p.port, blocks=mine, tokens=tokens)
        if not i % 2:
            p("prefill", handoff=f"h{i}", request=f"p{i}", blocks=blocks, tokens=tokens, chunks=2)
        assert d("wait", request=f"d{i}") is None
        assert p("wait", request=f"p{i}") is None
        assert d("digest", blocks=mine) == p("digest", blocks=blocks)


def move(p: PeerProcess, d: PeerProcess, host: str = "127.0.0.1") -> None:
    """Hand over some blocks and compare the bytes."""
    p("fill", blocks=[1, 2, 3], seed=7)
    p("prefill", handoff="h", request="p1", blocks=[1, 2, 3], tokens=11)
    d("open", handoff="h", request="d1", engine="p", port=p.port, blocks=[9, 8, 7], tokens=11, host=host)
    assert d("wait", request="d1") is None
    assert p("wait", request="p1") is None
    assert d("digest", blocks=[9, 8, 7]) == p("digest", blocks=[1, 2, 3])


FIRST, SECOND = {"KVXFER_SECRET": "what the engines share"}, {"KVXFER_SECRET": "quite another secret"}
THEIRS = WIRE_VERSION + 1
UNLIKE = [
    pytest.param(
        {"wire": THEIRS},
        {},
        f"d rank 0 speaks wire version {WIRE_VERSION}, p rank 0 speaks {THEIRS}: install",
        id="older",
    ),
    pytest.param(
        {},
        {"wire": THEIRS},
        f"d rank 0 speaks wire version {THEIRS}, p rank 0 speaks {WIRE_VERSION}: install",
        id="newer",
    ),
    pytest.param(
        {"env": FIRST, "wire": THEIRS},
        {"env": FIRST},
        f"speaks wire version {WIRE_VERSION}, p rank 0 speaks {THEIRS}",
        id="older, secret",
    ),
    pytest.param(
        {"env": FIRST},
        {"env": SECOND},
        "d rank 0 and p rank 0 have different shared secrets: give both",
        id="secrets differ",
    ),
    pytest.param(
        {"env": FIRST}, {}, "d rank 0 has no shared secret, p rank 0 asks for one: give both", id="secret, none"
    ),
    pytest.param({}, {"env": FIRST}, "d rank 0 has a shared secret, p rank 0 has none: give both", id="none, secret"),
]


@pytest.mark.parametrize(("theirs", "mine", "said"), UNLIKE)
def test_processes_that_cannot_talk_say_why_at_both_and_the_request_fails_at_once(peers, theirs, mine, said) -> None:
    """Long before the time-out for connecting, which is the test's own."""
    p, d = peers("p", **theirs), peers("d", connect_timeout=100.0, **mine)
    d("open", handoff="h", request="d1", engine="p", port=p.port, blocks=[9], tokens=4)
    reason = d("wait", request="d1", timeout=20.0)
    assert said in reason
    for process in (p, d):
        assert said in process.log.read_text()
    third = peers("d2", **{**theirs, "connect_timeout": 5.0})
    move(p, third)


def test_processes_that_share_a_secret_hand_over(peers) -> None:
    move(peers("p", env=FIRST), peers("d", env=FIRST))


@pytest.mark.parametrize("env", [{}, FIRST], ids=["no secret", "secret"])
@pytest.mark.parametrize("bound", ["::1", "::"])
def test_processes_hand_over_where_the_control_channel_is_ipv6(peers, bound, env) -> None:
    if not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    move(peers("p", host=bound, env=env), peers("d", host=bound, env=env), host="::1")
