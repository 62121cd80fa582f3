"""kv_transfer_params come from outside: whatever they hold, a request is a source, a sink, neither, or told what is wrong."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer import addresses
from kvxfer.connector.params import ParamsError, SinkParams, SourceParams, parse
from kvxfer.protocol.ids import MAX_ID_LENGTH, HandoffId
from kvxfer.transport.commands import EngineAddress

P, D = "cmpl-x-0-00000000", "cmpl-x-0-11111111"
SINK = {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "10.0.0.1", "remote_port": 5600}
KEYS = ["do_remote_prefill", "do_remote_decode", "transfer_id", "remote_request_id", "remote_host", "remote_port"]
KEYS += ["remote_engine_id", "kvxfer_probe", "kvxfer_peers", "remote_block_ids"]

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


@given(st.text(max_size=40), st.dictionaries(st.sampled_from(KEYS), _JSON | st.just(True)) | _JSON)
@example(D, {**SINK, "remote_port": "9" * 5000})
@example(D, {**SINK, "transfer_id": "\ud800"})
@example(D, {**SINK, "remote_host": "\udfff"})
@example(D, {**SINK, "remote_request_id": "cmpl-x-" + "9" * 400 + "-00000000"})
@example("9" * 5000 + "_x", {"do_remote_decode": True})
@example("x" * 9000, {"do_remote_decode": True})
@example("\ud800", {"do_remote_decode": True})
@example(D, {**SINK, "remote_port": float("nan")})
@example(D, {**SINK, "remote_port": 10**6000})
@example(D, {"do_remote_prefill": 1})
@example(D, {**SINK, "remote_host": "x" * 1_000_000})
@example(D, {**SINK, "remote_host": "[" * 200})
@example(D, {**SINK, "remote_host": "a\nb\x1b[2J"})
@example(D, {**SINK, "transfer_id": "x" * 1_000_000})
def test_anything_is_read_or_refused_in_words_and_what_is_read_can_be_sent(request_id, params) -> None:
    """An error of any other kind would end the engine core."""
    try:
        read = parse(request_id, params)
    except ParamsError as error:
        read, said = None, str(error)
    else:
        said = ""
    assert len(said) < 1200, "repeats what may be large"
    assert said.isprintable(), "repeats what may be hostile"
    if read is not None:
        assert len(read.handoff.transfer) <= MAX_ID_LENGTH
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(read.handoff), type=HandoffId) == read.handoff
    if isinstance(read, SinkParams):
        assert 0 < read.source.port < 65536
        assert read.source.host.encode()
        assert str(read.source).isprintable()
        assert not addresses.is_wildcard(read.source.host)


@given(
    st.recursive(
        _JSON, lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(KEYS) | st.text(), inner), max_leaves=30
    )
)
def test_arbitrary_json_raises_nothing_but_what_says_why(params) -> None:
    with contextlib.suppress(ParamsError):
        parse(D, params)
    for key in KEYS:
        with contextlib.suppress(ParamsError):
            parse(D, {**SINK, key: params})


def test_what_is_nested_deeply_is_described_without_being_walked() -> None:
    value: object = []
    for _ in range(100_000):
        value = [value]
    for key in [key for key in KEYS if key not in ("remote_block_ids", "do_remote_prefill")]:
        with pytest.raises(ParamsError, match=f"{key} is a list"):
            parse(
                D,
                {**SINK, "transfer_id": None, key: value}
                | ({"do_remote_prefill": False, "do_remote_decode": True} if key.startswith("kvxfer_") else {})
                | ({"kvxfer_probe": True} if key == "kvxfer_peers" else {}),
            )


@pytest.mark.parametrize(
    "params", [None, {}, {"do_remote_prefill": False}, {"do_remote_decode": None, "transfer_id": "t"}]
)
def test_a_request_without_a_part_in_a_handoff_has_none(params) -> None:
    assert parse(P, params) is None


def test_upstreams_prefill_leg() -> None:
    params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert parse(P, params) == SourceParams(HandoffId("x"), probe=False)


def test_upstreams_pull_decode_leg() -> None:
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "prefill-1",
        "remote_request_id": P,
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": 40,
        "transfer_mode": "pull",
    }
    read = parse("cmpl-another-0-11111111", params)
    assert read == SinkParams(HandoffId("x"), EngineAddress("10.0.0.1", 5600, "prefill-1"))
    assert read.handoff == parse(P, {"do_remote_decode": True}).handoff


@pytest.mark.parametrize("transfer", [None, "xfer-1"])
def test_upstreams_push_legs_meet(transfer) -> None:
    source = parse(P, {"do_remote_decode": True, "transfer_id": transfer})
    sink = parse(D, {**SINK, "remote_request_id": "x", "transfer_id": transfer, "pp_size": 1})
    assert sink.handoff == source.handoff == HandoffId(transfer or "x")


def test_a_probe_is_a_source_that_hands_nothing_over() -> None:
    assert parse(P, {"do_remote_decode": True, "kvxfer_probe": True}).probe


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_is_read_with_and_without_brackets(host) -> None:
    assert parse(D, {**SINK, "remote_host": host}).source.host == "::1"


def test_a_port_in_digits_is_a_port() -> None:
    assert parse(D, {**SINK, "remote_port": "5600"}).source.port == 5600


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ([1], "kv_transfer_params is a list, not an object"),
        ({"do_remote_prefill": True, "do_remote_decode": True}, "a leg is one or the other"),
        ({"do_remote_decode": "yes"}, "do_remote_decode is a string of 3 characters, not true or false"),
        ({"do_remote_decode": True, "transfer_id": 7}, "transfer_id is 7, not a string"),
        ({"do_remote_decode": True, "transfer_id": "x" * 513}, "transfer_id is a string of 513 characters"),
        ({"do_remote_decode": True, "transfer_id": "\ud800"}, "transfer_id is a string of 1 characters"),
        ({**SINK, "remote_host": None}, "remote_host is missing"),
        ({**SINK, "remote_host": ""}, "remote_host is missing"),
        ({**SINK, "remote_host": "::"}, "remote_host is ::, which names no host: set advertise_host"),
        ({**SINK, "remote_host": "fe80::1%eth0"}, "remote_host: 'fe80::1%eth0' has a zone id"),
        ({**SINK, "remote_host": "::1:5600:x"}, "remote_host: '::1:5600:x' is not an IPv6 address"),
        ({**SINK, "remote_host": 5}, "remote_host is 5, not a string"),
        ({**SINK, "remote_port": None}, "remote_port is missing"),
        ({**SINK, "remote_port": True}, "remote_port is True"),
        ({**SINK, "remote_port": 0}, "remote_port is 0"),
        ({**SINK, "remote_port": 65536}, "remote_port is 65536"),
        ({**SINK, "remote_port": 1.5}, "remote_port is 1.5"),
        ({**SINK, "remote_port": "http"}, "remote_port is a string of 4 characters"),
        ({**SINK, "remote_engine_id": {}}, "remote_engine_id is a dict"),
        ({**SINK, "remote_request_id": []}, "remote_request_id is a list"),
    ],
)
def test_what_is_malformed_is_named_by_its_key(params, text) -> None:
    with pytest.raises(ParamsError, match=text):
        parse(D, params)


PROBE = {"do_remote_decode": True, "kvxfer_probe": True}


def test_a_probe_names_engines_to_be_connected() -> None:
    params = parse(P, {**PROBE, "kvxfer_peers": ["10.0.0.1:5600", "[fd00::1]:5601", "host:7"]})
    assert isinstance(params, SourceParams)
    assert params.peers == (
        EngineAddress("10.0.0.1", 5600, ""),
        EngineAddress("fd00::1", 5601, ""),
        EngineAddress("host", 7, ""),
    )


@pytest.mark.parametrize("peers", [None, []])
def test_a_probe_need_not_name_any(peers) -> None:
    assert parse(P, {**PROBE, "kvxfer_peers": peers}).peers == ()


def test_only_a_probe_names_engines() -> None:
    """A handoff's own params come from clients as well; who they may name is its other leg."""
    assert parse(P, {"do_remote_decode": True, "kvxfer_peers": ["10.0.0.1:5600"]}).peers == ()


@pytest.mark.parametrize(
    ("peers", "why"),
    [
        ("10.0.0.1:5600", "kvxfer_peers is .*, not a list of at most 1,024 control addresses"),
        ([5600], "not a list"),
        ([["10.0.0.1", 5600]], "not a list"),
        (["10.0.0.1:5600"] * 1025, "not a list of at most 1,024"),
        (["10.0.0.1"], "kvxfer_peers: "),
        (["10.0.0.1:0"], "kvxfer_peers: "),
        (["10.0.0.1:65536"], "kvxfer_peers: "),
        (["a b:5600"], "kvxfer_peers: "),
    ],
)
def test_engines_that_are_none_are_told(peers, why) -> None:
    with pytest.raises(ParamsError, match=why):
        parse(P, {**PROBE, "kvxfer_peers": peers})
