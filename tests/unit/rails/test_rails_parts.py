"""Addresses, names and counters."""

from __future__ import annotations

import pytest

from kvxfer.rails.counters import read_counters, traffic
from kvxfer.rails.instances import INSTANCE_TYPES
from kvxfer.rails.pci import Address, Node, rail_name


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("0000:59:00.0", "0000:59:00.0"),
        ("0:59:00.0", "0000:59:00.0"),
        ("cc:00.0", "0000:cc:00.0"),
        ("00000002:0A:1f.7", "0002:0a:1f.7"),
        (" 10:1c.0\n", "0000:10:1c.0"),
    ],
)
def test_addresses(text, written) -> None:
    assert str(Address.parse(text)) == written
    assert Address.parse(written) == Address.parse(text)


@pytest.mark.parametrize("text", ["", "59", "59:00", "0000:59:00.8", "rdmap85s0", "xx:00.0", "0000:59:00.0.0"])
def test_what_is_no_address(text) -> None:
    with pytest.raises(ValueError, match="not a PCI address"):
        Address.parse(text)


@pytest.mark.parametrize(
    ("at", "name"),
    [
        ("0000:55:00.0", "rdmap85s0"),
        ("0000:10:1b.0", "rdmap16s27"),
        ("0000:00:06.1", "rdmap0s6f1"),
        ("0001:55:00.0", "rdmaP1p85s0"),
    ],
)
def test_rdma_cores_names(at, name) -> None:
    assert Node("device", address=Address.parse(at)).rail == name


def test_domain_names_lose_their_endpoint_type() -> None:
    assert [rail_name(name) for name in ("rdmap85s0-rdm", "rdmap85s0-dgrm", "rdmap85s0", "eth0")] == [
        "rdmap85s0",
        "rdmap85s0",
        "rdmap85s0",
        "eth0",
    ]


def test_the_table_of_instances_is_consistent() -> None:
    for row in INSTANCE_TYPES.values():
        assert row.source
        assert [pair.index for pair in row.pairs] == list(range(len(row.pairs)))
        if row.pairs:
            assert len(row.pairs) == row.accelerators
            assert len({pair.efa for pair in row.pairs}) == row.efas
            addresses = [pair.device for pair in row.pairs if pair.device]
            assert len(set(addresses)) == len(addresses)


def put(root, rail: str, **values: object) -> None:
    folder = root / "sys/class/infiniband" / rail / "ports/1/hw_counters"
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name).write_text(f"{value}\n")


def test_shares_of_what_moved(tmp_path) -> None:
    put(tmp_path, "rdmap85s0", tx_bytes=100, rx_bytes=50, rdma_write_bytes=90, send_bytes=0)
    put(tmp_path, "rdmap86s0", tx_bytes=7, rx_bytes=3, send_bytes=1)
    before = read_counters(["rdmap85s0", "rdmap86s0", "rdmap87s0"], tmp_path)
    assert set(before) == {"rdmap85s0", "rdmap86s0"}
    put(tmp_path, "rdmap85s0", tx_bytes=400, rx_bytes=50, rdma_write_bytes=390, send_bytes=0)
    put(tmp_path, "rdmap86s0", tx_bytes=107, rx_bytes=3, send_bytes=1)
    first, second = traffic(before, read_counters(["rdmap85s0", "rdmap86s0"], tmp_path))
    assert (first.rail, first.share, first.moved["rdma_write_bytes"], first.moved["send_bytes"]) == (
        "rdmap85s0",
        0.75,
        300,
        0,
    )
    assert (second.rail, second.share) == ("rdmap86s0", 0.25)


def test_counters_that_were_reset_count_from_zero() -> None:
    moved = traffic({"a": {"tx_bytes": 500}}, {"a": {"tx_bytes": 20}})
    assert moved[0].moved["tx_bytes"] == 20


def test_nothing_moved_has_no_shares() -> None:
    assert traffic({"a": {"tx_bytes": 5}}, {"a": {"tx_bytes": 5}})[0].share == 0


def test_counters_that_are_no_numbers(tmp_path) -> None:
    put(tmp_path, "rdmap85s0", tx_bytes="N/A no PMA", rx_bytes=3)
    assert read_counters(["rdmap85s0"], tmp_path) == {"rdmap85s0": {"rx_bytes": 3}}
