"""Suite `store` on tiny blocks, beside a made-up store: its rows, their units, and what a ratio compares."""

import pytest

from kvstore.block import BlockFormat
from launch.benchmarks.million_keys import ROWS, directory_rows
from launch.benchmarks.options import Options
from launch.benchmarks.store import SMALL_BATCH, SMOLLM2, Load, store_rows
from models.config import PRESETS
from mooncake_jax.engine.jax_prefill import block_format

TINY = Load(BlockFormat(4, 1, 4, 16, "float32", 2), num_blocks=3, num_singles=5)
SPEEDS = ["batch_put", "batch_get_local", "batch_get_remote", "range_get", "ssd_put", "ssd_get"]
ALONE = ["ssd_put", "ssd_get"]  # without a peer
TIMES = ["put_4KB", "put_4KB_single", "get_4KB", "exists", "exists_fresh"]


class FakePeer:
    """A store that takes 1 s for anything."""

    name = "fake"

    def __init__(self):
        self.asked = []

    def seconds(self, op, count):
        self.asked.append((op, count))
        return 1.0


def test_rows_units_and_what_the_peer_is_compared_by():
    peer = FakePeer()
    rows = {row.name: row for row in store_rows(Options(True, None, "", ()), TINY, peer)}
    assert list(rows) == SPEEDS + TIMES
    for name in SPEEDS:
        row = rows[name]
        nbytes = TINY.num_blocks * (TINY.format.group_nbytes if name == "range_get" else TINY.format.nbytes)
        assert (row.unit, row.better) == ("GB/s", "higher")
        assert row.ours > 0
        if name not in ALONE:
            assert row.peer_name == "fake"
            assert row.peer == pytest.approx(nbytes / 1e9)
    for name in TIMES:
        row = rows[name]
        count = SMALL_BATCH if name == "put_4KB" else TINY.num_singles
        assert (row.unit, row.better) == ("µs", "lower")
        assert row.peer == pytest.approx(1e6 / count)
        assert row.ratio == pytest.approx(row.peer / row.ours)
    assert rows["batch_get_local"].ceiling
    assert {op for op, _ in peer.asked} == {
        *SPEEDS[:4],
        "put_small_batch",
        "put_small",
        "get_small",
        *TIMES[3:],
    }


def test_only_the_rows_asked_for_and_no_peer():
    (row,) = store_rows(Options(True, None, "", ("exists_fresh",)), TINY, None)
    assert (row.name, row.peer, row.ratio, row.peer_name) == ("exists_fresh", None, None, None)


def test_the_rows_of_a_large_directory_come_from_one_that_was_filled():
    rows = {row.name: row for row in directory_rows(Options(True, None, "", ()), 20_000)}
    assert tuple(rows) == ROWS
    assert all(row.ours > 0 and row.better == "lower" for row in rows.values())
    assert rows["replica_memory"].unit == rows["directory_memory"].unit == "B/key"
    assert 50 < rows["replica_memory"].ours < 5000
    assert list(directory_rows(Options(True, None, "", ("batch_put",)), 20_000)) == []


def test_the_blocks_have_the_layout_that_the_prefill_engine_stores():
    served = block_format(PRESETS["smollm2-135m"], "bfloat16")
    assert (SMOLLM2.num_groups, SMOLLM2.nbytes * served.block_tokens) == (
        served.num_groups,
        served.nbytes * SMOLLM2.block_tokens,
    )
