import csv
import dataclasses

import jax
import pytest

from launch import rivals
from launch.rivals import Crossing, outcome
from models.config import PRESETS
from mooncake_jax.cost_model import CostModelFile

COSTS = CostModelFile.load("a800_llama3_70b").costs
CFG = dataclasses.replace(PRESETS["tiny"], num_heads=4, num_kv_heads=2, num_layers=4)
LARGE = PRESETS["llama3-70b"]
PEAK = 8 * 312e12
X = 2


def test_what_crosses_is_counted_in_the_programs_of_all_three():
    found = {kind: rivals.crossing(CFG, kind, X, jax.devices()) for kind in rivals.KINDS}
    D, KV, ring = CFG.d_model, 2 * CFG.num_kv_heads * CFG.head_dim, (X - 1) / X
    nbytes = {kind: one.nbytes_per_token_and_layer / rivals.WIRE_NBYTES for kind, one in found.items()}
    assert nbytes == pytest.approx({"CPP": D / 2, "TP": 2 * D * 2 * ring, "SP": KV * ring})
    assert {kind: one.collectives_per_layer for kind, one in found.items()} == {"CPP": 0.5, "TP": 2, "SP": 1}
    assert rivals.crossing(CFG, "TP", 1, []).nbytes_per_token_and_layer == 0.0


def test_a_model_of_one_node_takes_what_the_cost_model_says():
    alone = outcome(LARGE, COSTS, Crossing("CPP", 1, 0.0, 0.0), 65_536, 2048, PEAK)
    assert alone.ttft_seconds == pytest.approx(COSTS.prefill_seconds(65_536, 0))
    assert alone.bubble_fraction == alone.sent_gigabytes == alone.collectives == 0


def test_bubbles_and_bytes_of_a_pipeline_follow_the_formula(tmp_path):
    hop = Crossing("CPP", 4, 4 / 80, 8192 * 2 * 4 / 80)
    got = outcome(LARGE, COSTS, hop, 65_536, 2048, PEAK)
    C = 65_536 // 2048
    assert got.bubble_fraction == pytest.approx(3 / (C + 3))
    assert got.sent_gigabytes == pytest.approx(65_536 * 8192 * 2 / 1e9)
    assert got.collectives == C
    assert outcome(LARGE, COSTS, hop, 65_536, 2048, PEAK, balanced=True).ttft_seconds < got.ttft_seconds
    rivals.write_csv(tmp_path / "made" / "out.csv", [got])
    with (tmp_path / "made" / "out.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["ttft_seconds"]) == got.ttft_seconds
    assert "| 64 k | 4 | CPP | 2048 |" in rivals.table([got])


def test_short_prompts_cost_no_bubbles_unless_the_pipeline_drains():
    mix = [32_768, 2048, 2048]
    assert rivals.queue_bubbles(mix, 2048, 4, drained=False) == pytest.approx(3 / 21)
    assert rivals.queue_bubbles(mix, 2048, 4, drained=True) == pytest.approx(1 - 18 / 27)
