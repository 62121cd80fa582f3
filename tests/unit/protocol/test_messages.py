"""Whatever crosses the wire comes out as it went in, or as a RemoteProtocolError that says what is wrong."""

from __future__ import annotations

import contextlib
import typing

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvxfer.errors import RemoteProtocolError
from kvxfer.protocol import messages as m
from kvxfer.protocol.ids import MAX_ID_LENGTH, HandoffId, RankId

TYPES = typing.get_args(m.AnyMessage)
ME = RankId("decode-1", "4f1d", 0)

_LEAF = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
)
_JSON = st.recursive(
    _LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)
# What stands for a reason is made printable when it is read; see test_reasons_are_fit_for_a_log.
_PRINTABLE = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")))
_SIMPLE = {
    str: _PRINTABLE,
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    bytes: st.binary(),
    bool: st.booleans(),
    typing.Any: _JSON,
}


def values_of(kind) -> st.SearchStrategy:
    """Make values of an annotated type, by introspection: a field added to a message is tested without being listed here."""
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return within(args[0], args[1])
    if kind == m.Proof | None:
        return st.none() | values_of(m.Proof)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple and args[1:] == (...,):
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    if origin is list:
        return st.lists(values_of(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=3)
    return st.builds(kind, **{field.name: values_of(field.type) for field in msgspec.structs.fields(kind)})


def within(kind, meta: msgspec.Meta) -> st.SearchStrategy:
    """Make values within the limits that a field declares."""
    longest = meta.max_length if meta.max_length is not None else 8
    if kind is int:
        low, high = meta.ge if meta.ge is not None else meta.gt + 1, meta.le if meta.le is not None else meta.lt - 1
        return st.integers(low, high)
    if kind is float:
        return st.floats(meta.ge, meta.le)
    if kind is str:
        return st.text(max_size=min(longest, 20))
    if kind is bytes:
        return st.binary(max_size=min(longest, 40)).map(lambda raw: raw[: len(raw) // 4 * 4])
    return values_of(kind)  # three elements, see below


MESSAGES = st.one_of([values_of(kind) for kind in TYPES])
PACKED = st.builds(m.pack, st.just(ME), st.text(max_size=8), MESSAGES)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_every_message_survives_the_wire(kind) -> None:
    @settings(max_examples=25)
    @given(values_of(kind), values_of(RankId), st.text(max_size=m.MAX_REASON // 8))
    def survives(message, sender, to) -> None:
        envelope, got = m.unpack(m.pack(sender, to, message))
        assert (type(got), got) == (kind, message)
        assert (envelope.wire, envelope.sender, envelope.to) == (m.WIRE_VERSION, sender, to)

    survives()


def test_no_two_messages_share_a_tag_and_none_is_left_out_of_the_union() -> None:
    tags = [kind.__struct_config__.tag for kind in TYPES]
    assert len(set(tags)) == len(tags)
    assert set(TYPES) == set(m.Message.__subclasses__())


def opened(packed: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        m.unpack(packed)


@given(PACKED, st.data())
def test_a_truncated_message_is_refused(packed, data) -> None:
    cut = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(RemoteProtocolError):
        m.unpack(packed[:cut])


@given(PACKED, st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_message_is_read_or_refused_and_raises_nothing_else(packed, damages) -> None:
    damaged = bytearray(packed)
    for at, value in damages:
        damaged[at % len(damaged)] = value
    opened(bytes(damaged))


@given(st.binary(max_size=200))
@example(b"")
@example(b"\x91" * 100_000)
@example(b"\x81" * 3000)
@example(b"\xdd\xff\xff\xff\xff")
def test_any_bytes_are_refused_and_raise_nothing_else(raw) -> None:
    with pytest.raises(RemoteProtocolError):
        m.unpack(raw)
    opened(msgspec.msgpack.encode([m.WIRE_VERSION, ME, "", msgspec.Raw(raw)]))


@pytest.mark.parametrize(
    "card", [b"\x81" * 2000, b"\x81\xa1x\x81\x80\x01", b"\x81\xa1\xff\x01", b"\xd7\xff" + b"\xff" * 8]
)
def test_hostile_cards_are_refused(card) -> None:
    """Any accepts everything that msgpack can say: deep nesting, maps as keys, text that is not UTF-8, impossible times."""
    body = b"\x83\xa1t\xa5hello\xa4sent\xca\0\0\0\0\xa4card" + card
    with pytest.raises(RemoteProtocolError, match=r"malformed message from decode-1 rank 0|not a kvxfer message"):
        m.unpack(msgspec.msgpack.encode([m.WIRE_VERSION, ME, "", msgspec.Raw(body)]))


@given(
    st.integers(-(2**63), 2**64 - 1).filter(lambda v: v != m.WIRE_VERSION), st.lists(_JSON, max_size=3), st.booleans()
)
def test_another_wire_version_is_told_in_words_even_if_its_envelope_changed(version, rest, ours) -> None:
    body = [version, ME, "", msgspec.Raw(msgspec.msgpack.encode(m.WhoIs()))] if ours else [version, *rest]
    with pytest.raises(
        RemoteProtocolError, match=f" speaks wire version {version}, this process speaks {m.WIRE_VERSION}: install"
    ):
        m.unpack(msgspec.msgpack.encode(body))


def test_our_version_with_another_envelope_is_malformed_not_a_mismatch() -> None:
    with pytest.raises(RemoteProtocolError, match="malformed envelope"):
        m.unpack(msgspec.msgpack.encode([m.WIRE_VERSION, "who"]))


def test_a_message_above_the_limit_is_neither_sent_nor_read() -> None:
    fits = m.Register(HandoffId("x"), 1, "push", 0, 1, bytes(m.MAX_MESSAGE_BYTES - 1000), 0.0)
    assert m.unpack(m.pack(ME, "", fits))[1] == fits
    large = msgspec.structs.replace(fits, blocks=bytes(m.MAX_MESSAGE_BYTES))
    with pytest.raises(ValueError, match=r"Register of 8,388,\d+ bytes is above the limit of 8,388,608"):
        m.pack(ME, "", large)
    with pytest.raises(RemoteProtocolError, match=r"message of 8,388,609 bytes is above the limit"):
        m.unpack(bytes(m.MAX_MESSAGE_BYTES + 1))


@given(values_of(m.Written))
def test_notifications_survive_the_wire(written) -> None:
    assert m.unpack_written(m.pack_written(written)) == written


@given(st.binary(max_size=64) | st.builds(m.pack_written, values_of(m.Written)).map(lambda packed: packed[:-1]))
@example(b"\x91" * 4000)
def test_what_is_no_notification_is_refused(raw) -> None:
    with pytest.raises(RemoteProtocolError, match="malformed notification"):
        m.unpack_written(raw)


def test_the_longest_id_fits_into_a_notification_and_a_longer_notification_is_refused() -> None:
    top = 2**53 - 1
    index, position = 2**31 - 1, 2**31 - 1
    longest = m.Written(
        HandoffId("\U0010ffff" * MAX_ID_LENGTH, index, index), top, top, m.MAX_RANKS - 1, position, position
    )
    assert m.unpack_written(m.pack_written(longest)) == longest
    with pytest.raises(RemoteProtocolError, match="4,097 bytes is above the limit of 4,096"):
        m.unpack_written(bytes(4097))


# --- what a field may hold --------------------------------------------------------------------------------------------


def limited(kind, path=()):
    """Every limited number, text and list of a message: (path to it, its limits), through everything that it contains."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        yield path, args[0], args[1]
        yield from limited(args[0], path)
    elif origin in (tuple, list) and args:
        yield from limited(args[0], (*path, 0))
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        array = kind.__struct_config__.array_like
        for index, field in enumerate(msgspec.structs.fields(kind)):
            yield from limited(field.type, (*path, index if array else field.name))


def beyond(base, meta: msgspec.Meta) -> list:
    """Values just outside the limits, and those that no limit of a number may let pass."""
    if base is float:
        return [float("nan"), float("inf"), float("-inf"), meta.le * 1.01, -1.0, 2**64 - 1]
    if base is int:
        high = meta.le if meta.le is not None else meta.lt - 1
        low = meta.ge if meta.ge is not None else meta.gt + 1
        return [low - 1, high + 1, -(2**63), 2**64 - 1, 0.5, "1", True]
    filler = {str: "x", bytes: b"x"}.get(base)
    if filler is not None:
        return [filler * (meta.max_length + 1)] if meta.max_length < m.MAX_MESSAGE_BYTES else []
    if typing.get_origin(base) is dict:
        return [{str(i): 0 for i in range(meta.max_length + 1)}]
    return [[{}] * (meta.max_length + 1)]


LIMITED = [(kind, *one) for kind in [*TYPES, m.Written] for one in limited(kind)]


def an_example(kind):
    """Make some value of a type, the same each time."""
    if typing.get_origin(kind) is typing.Annotated:
        base, meta = typing.get_args(kind)
        if base in (int, float):
            return base(meta.ge if meta.ge is not None else meta.gt + 1)
        return an_example(base)
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)[0]
    if kind in (str, bytes, int, float, bool):
        return kind()
    if typing.get_origin(kind) is tuple:
        return (an_example(typing.get_args(kind)[0]),)
    if typing.get_origin(kind) in (list, dict):
        return typing.get_origin(kind)()
    return kind(**{field.name: an_example(field.type) for field in msgspec.structs.fields(kind)})


@pytest.mark.parametrize(("kind", "path", "base", "meta"), LIMITED, ids=lambda v: getattr(v, "__name__", str(v))[:40])
def test_a_value_beyond_its_limits_is_refused_and_one_within_is_read(kind, path, base, meta) -> None:
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(an_example(kind)))
    if kind is not m.Written:
        plain = {
            **{
                f.name: msgspec.to_builtins(an_example(f.type), builtin_types=(bytes,))
                for f in msgspec.structs.fields(kind)
            },
            **plain,
        }

    def read(value) -> None:
        changed = msgspec.msgpack.decode(msgspec.msgpack.encode(plain))
        place = changed
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        packed = msgspec.msgpack.encode(changed)
        if kind is m.Written:
            m.unpack_written(packed)
        else:
            m.unpack(msgspec.msgpack.encode([m.WIRE_VERSION, ME, "", msgspec.Raw(packed)]))

    read(within_as_plain(base, meta))
    for value in beyond(base, meta):
        with pytest.raises(RemoteProtocolError):
            read(value)


def within_as_plain(base, meta):
    return msgspec.to_builtins(an_example(typing.Annotated[base, meta]), builtin_types=(bytes,))


def test_every_number_and_every_list_of_a_message_has_limits() -> None:
    """A field that is added to a message without any would be found here."""

    def bare(kind, where):
        origin = typing.get_origin(kind)
        if origin is typing.Annotated:
            return
        if kind in (int, float, bytes) or origin in (list, dict, tuple):
            yield where
        elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            for field in msgspec.structs.fields(kind):
                yield from bare(field.type, f"{where}.{field.name}")

    found = [where for kind in [*TYPES, m.Written, m.Proof] for where in bare(kind, kind.__name__)]
    assert found == []


@pytest.mark.parametrize("kind", [m.Refused, m.Cancel, m.Release, m.Failed])
def test_reasons_are_fit_for_a_log(kind) -> None:
    fields = {"handoff": HandoffId("h"), "attempt": 1, "reason": "why\nWARNING: all is well\x1b[2J" * 100}
    message = kind(**{name: fields[name] for name in kind.__struct_fields__})
    read = m.unpack(m.pack(ME, "", message))[1]
    assert read.reason.isprintable()
    assert read.reason.startswith("why\\nWARNING: all is well\\x1b[2J")
    assert len(read.reason) < 3 * m.MAX_REASON
    assert msgspec.structs.replace(read, reason="") == msgspec.structs.replace(message, reason="")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_block_ids_are_whole(size) -> None:
    blocks = bytes(size)
    for message in (
        m.Register(HandoffId("h"), 1, "push", 0, 4, blocks, 1.0),
        m.Grant(HandoffId("h"), 1, 0, 4, blocks, 1.0, 1.0),
    ):
        with pytest.raises(RemoteProtocolError, match=rf"decode-1 rank 0 names blocks in {size} bytes"):
            m.unpack(m.pack(ME, "", message))


@pytest.mark.parametrize(
    ("message", "limit"),
    [
        (m.Hello({"agent": bytes(m.MAX_CARD_BYTES)}, 1.0), m.MAX_CARD_BYTES),
        (m.Welcome({"agent": bytes(m.MAX_CARD_BYTES)}, 1.0, 1.0, 1.0), m.MAX_CARD_BYTES),
        (m.Failed(HandoffId("h"), 1, "x" * m.MAX_SMALL_BYTES), m.MAX_SMALL_BYTES),
    ],
)
def test_each_kind_has_its_largest_size(message, limit) -> None:
    with pytest.raises(RemoteProtocolError, match=f"from decode-1 rank 0 is above its limit of {limit:,}"):
        m.unpack(m.pack(ME, "", message))


@pytest.mark.parametrize("version", [0, m.WIRE_VERSION, 99])
def test_a_refusal_is_read_whatever_the_version(version) -> None:
    packed = msgspec.msgpack.encode([version, "refused", "because\nof", {"more": "later"}])
    assert m.open_envelope(packed) == m.Refusal(version, "refused", "because\\nof")
    with pytest.raises(RemoteProtocolError, match=r"^because\\nof$"):
        m.unpack(packed)
    ours = msgspec.msgpack.decode(m.pack_refusal("because"))
    assert ours == [m.WIRE_VERSION, "refused", "because"], "the shape that never changes"


def test_who_speaks_another_version_is_named_where_that_can_be_read() -> None:
    with pytest.raises(m.WireVersionError, match="decode-1 rank 0 speaks wire version 99, this process speaks"):
        m.unpack(msgspec.msgpack.encode([99, ME, {}, "anything"]))
    with pytest.raises(m.WireVersionError, match="decode-1 rank 0 speaks wire version 99, this process speaks"):
        m.unpack(msgspec.msgpack.encode([99, ME, "", msgspec.Raw(b"\xc0")]))
    with pytest.raises(m.WireVersionError, match="the peer speaks wire version 99"):
        m.unpack(msgspec.msgpack.encode([99]))


def test_a_proof_covers_the_body_and_what_was_heard_last() -> None:
    seen: list[bytes] = []

    def prove(covered: bytes) -> m.Proof:
        seen.append(covered)
        return m.Proof(b"link", len(seen), b"mac")

    envelopes = [
        m.open_envelope(m.pack(RankId("a", "b", 0), "c", m.Release(HandoffId(name), "why"), prove, heard))
        for name, heard in (("h", 1.0), ("h", 2.0), ("i", 1.0))
    ]
    assert len(set(seen)) == 3
    assert [m.proven(envelope.body, envelope.heard) for envelope in envelopes] == seen
    assert [envelope.heard for envelope in envelopes] == [1.0, 2.0, 1.0]
