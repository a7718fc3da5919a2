"""The transfer suite in small: every row is measured, none is faster than it can be."""

import pytest

from launch.benchmarks import transfer
from launch.benchmarks.options import Options
from launch.benchmarks.raw_sockets import RawSockets


def test_every_row_has_its_ceiling_and_rows_can_be_picked(monkeypatch):
    monkeypatch.setattr(transfer, "NBYTES", 1 << 20)
    monkeypatch.setattr(transfer, "PIECES", {"16KB": 1 << 14, "1MB": 1 << 20})
    rows = transfer.run(Options(True, None, "", ("tcp_write_16KB", "tcp_read")))
    assert [row.name for row in rows] == [
        "tcp_write_16KB",
        "tcp_read_16KB",
        "tcp_read_1MB",
        "tcp_read_1MB_crc",
    ]
    assert all(row.ours > 0 and row.ceiling and row.peer is None for row in rows)


@pytest.mark.parametrize("num_connections", [1, 4])
def test_raw_sockets_move_bytes_both_ways(num_connections):
    with RawSockets(1 << 20, num_connections) as raw:
        assert raw.gigabytes_per_second("write") > 0
        assert raw.gigabytes_per_second("read") > 0
