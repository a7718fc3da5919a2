"""Emulated engines: the model's time to the tile, bytes that can be told apart, and a whole cluster of them."""

import numpy as np
import pytest
from e2e.cluster import LocalCluster

from kvstore.block import BlockFormat
from models import draw as draws
from mooncake_jax.cost_model import CostModelFile
from mooncake_jax.decode.config import DecodeConfig
from mooncake_jax.engine.contract import BatchRows, GroupKV, Sampled
from mooncake_jax.engine.emulated import EmulatedDecodeEngine, EmulatedPrefillEngine, Pace
from mooncake_jax.request import Sampling

FORMAT = BlockFormat(4, 1, 2, 512, "bfloat16", 2)
COSTS = CostModelFile.load("a800_llama3_70b").costs
Z = FORMAT.block_tokens


class Ledger(Pace):
    """Adds the modelled seconds up, and sleeps for none of them."""

    def __init__(self):
        super().__init__(1.0)
        self.spent = 0.0

    def begin(self) -> None:
        pass

    def spend(self, modelled_seconds: float) -> None:
        self.spent += modelled_seconds


def engine(kind, pace, **changes):
    fields = {"fingerprint": b"e", "vocab_size": 258, "max_tokens": 8192, "num_slots": 2, "pace": pace}
    return kind(COSTS, FORMAT, **{**fields, **changes})


def prefill(prefill_engine, tokens, num_prefix=0):
    """KV blocks computed, `[M, L, K, 2, Z, H]`, and the first token."""
    kv = np.zeros((FORMAT.num_blocks(len(tokens)), *FORMAT.shape), FORMAT.item_dtype)
    prefix = [np.zeros(FORMAT.group_shape, FORMAT.item_dtype)] * (num_prefix // Z)
    start, load, first = num_prefix, (lambda group: prefix) if prefix else None, -1
    while start < len(tokens):
        tile = np.array(tokens[start : start + prefill_engine.tile_tokens])
        last = start + len(tile) == len(tokens)
        for item in prefill_engine.prefill(0, tile, start, load=load, sample=Sampling() if last else None):
            if isinstance(item, GroupKV):
                layers = slice(2 * item.group, 2 * item.group + 2)
                kv[item.first_block : item.first_block + len(item.blocks), layers] = item.blocks
            else:
                assert isinstance(item, Sampled)
                first = item.token
        start, load = start + len(tile), None
    return kv, first


@pytest.mark.parametrize(
    ("num_tokens", "num_prefix"), [(1, 0), (1024, 0), (5000, 0), (5000, Z), (5000, 4096)]
)
def test_the_tiles_of_a_prompt_take_what_the_model_says_of_it(num_tokens, num_prefix):
    pace = Ledger()
    prefill(engine(EmulatedPrefillEngine, pace), list(range(num_tokens)), num_prefix)
    assert pace.spent == pytest.approx(COSTS.prefill_seconds(float(num_tokens), float(num_prefix)))


def test_bytes_tell_tokens_positions_and_layers_apart():
    kv, first = prefill(engine(EmulatedPrefillEngine, Ledger()), [5] * 1100)
    other, _ = prefill(engine(EmulatedPrefillEngine, Ledger()), [6] * 1100)
    assert kv.shape[0] == 3
    assert not (kv[2, :, :, :, 1100 - 2 * Z :]).any()  # nothing after the last token
    rows = kv[:2, :, 0, 0, :, 0].astype(int)  # [M, L, Z]
    assert len(np.unique(rows[:, 0])) == 2 * Z
    assert (rows[:, 0] != rows[:, 1]).all()
    assert (kv[:2] != other[:2]).all()
    assert prefill(engine(EmulatedPrefillEngine, Ledger()), [5] * 1100)[1] == first


def test_a_step_takes_what_the_model_says_and_writes_where_it_should():
    pace = Ledger()
    decode = engine(EmulatedDecodeEngine, pace, num_slots=3)
    kv, _ = prefill(engine(EmulatedPrefillEngine, Ledger()), [9] * 600)
    decode.insert(1, 0, kv)
    rows = BatchRows(np.arange(3) == 1, np.full(3, 9, np.int32), np.full(3, 600, np.int32), draws.blank(3))
    drawn = decode.generate(rows)
    assert pace.spent == pytest.approx(COSTS.step_seconds(1.0, 600.0))
    assert drawn.tokens.tolist()[0] == -1
    assert 33 <= drawn.tokens[1] < 127
    longer, _ = prefill(engine(EmulatedPrefillEngine, Ledger()), [9] * 601)
    assert (decode.extract(1, 1) == longer[1]).all()
    assert (decode.extract(1, 0) == kv[0]).all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="block edge"):
        list(engine(EmulatedPrefillEngine, Ledger()).prefill(0, np.zeros(4, np.int32), 3))
    with pytest.raises(ValueError, match="layer group 0"):
        list(
            engine(EmulatedPrefillEngine, Ledger()).prefill(
                0, np.zeros(4, np.int32), Z, load=lambda group: []
            )
        )
    with pytest.raises(ValueError, match="shape"):
        engine(EmulatedDecodeEngine, Ledger()).insert(0, 0, np.zeros((1, 2, 3)))
    with pytest.raises(ValueError, match="time_scale"):
        Pace(0.0)


def test_a_pace_takes_its_time():
    import time

    pace = Pace(0.5)
    start = time.monotonic()
    pace.begin()
    pace.spend(0.04)
    pace.spend(0.06)
    assert time.monotonic() - start >= 0.05


def test_a_cluster_of_emulated_nodes_reuses_moves_and_answers():
    with LocalCluster(
        host_ids=lambda name: name,
        num_home_blocks=64,
        prefill_engine=lambda: engine(EmulatedPrefillEngine, Pace(1e-3)),
        decode_engine=lambda: engine(EmulatedDecodeEngine, Pace(1e-3), num_slots=4),
        decode=DecodeConfig(staging_nbytes=4 << 20, quarantine_seconds=0.2),
    ) as cluster:
        tokens = [i % 250 for i in range(6 * Z + 100)]
        first = cluster.ask(tokens)
        here = first.placement.prefill.name
        cluster.wait_held(here, tokens, range(6))
        again = cluster.ask(tokens)
        fetched = cluster.ask(tokens, avoid=[here])
        assert first.tokens == again.tokens == fetched.tokens
        assert len(first.tokens) == 6
        assert (first.first.cached_tokens, again.first.cached_tokens) == (0, 6 * Z)
        assert fetched.first.fetched_tokens == 6 * Z
