"""Cost model files: complete, with a source per constant; the polynomials; and the fit, done again."""

import json

import numpy as np
import pytest

from kvstore.errors import InvalidError
from mooncake_jax.cost_model import CostModelFile, names

PROMPTS = np.array([8, 16, 32, 64, 128]) * 1024
FIGURE_14 = {
    0.0: (0.93, 1.98, 4.42, 10.6, 27.6),
    0.95: (0.10, 0.23, 0.39, 0.86, 2.31),
}  # seconds, off the page


@pytest.mark.parametrize("name", names())
def test_every_file_is_complete_and_says_where_it_comes_from(name):
    file = CostModelFile.load(name)
    assert file.name == name
    assert all(len(constant.source) > 20 for constant in file.constants.values())
    file.costs.estimator()


def test_only_the_batch_constant_is_fitted_elsewhere():
    file = CostModelFile.load("a800_llama3_70b")
    fitted = [name for name, constant in file.constants.items() if "FITTED" in constant.source]
    assert fitted == ["decode_seconds_per_extra_request"]


def test_prefill_constants_are_the_least_squares_fit_of_figure_14():
    rows, seconds = [], []
    for share, bars in FIGURE_14.items():
        prefix = share * PROMPTS
        rows.append(np.stack([np.ones(5), PROMPTS - prefix, (PROMPTS**2 - prefix**2) / 2], axis=1))
        seconds.append(bars)
    weights = 1 / np.concatenate(seconds)
    fit = np.linalg.lstsq(np.concatenate(rows) * weights[:, None], np.ones(10), rcond=None)[0]
    costs = CostModelFile.load("a800_llama3_70b").costs
    ours = (costs.prefill_base_seconds, costs.prefill_seconds_per_token, costs.prefill_seconds_per_pair)
    np.testing.assert_allclose(ours, fit, rtol=1e-4)


def test_the_polynomials_and_the_conductors_are_the_same():
    costs = CostModelFile.load("a800_llama3_70b").costs
    estimator = costs.estimator()
    num_tokens, prefix = 10_000.0, np.array([0.0, 512.0, 9_728.0])
    np.testing.assert_allclose(
        estimator.prefill_seconds(num_tokens, prefix),
        costs.prefill_seconds(np.full(3, num_tokens), prefix),
    )
    assert estimator.tbt_seconds(5.0, 40_000.0) == pytest.approx(costs.step_seconds(5, 40_000))
    assert costs.load_seconds(93e9 / costs.kv_nbytes_per_token) == pytest.approx(1.0)
    assert costs.step_seconds(1, 0) == costs.decode_base_seconds
    assert estimator.transfer_seconds(87e9) == pytest.approx(1.002)


def broken(tmp_path, change):
    path = tmp_path / "mine.json"
    CostModelFile.load("a800_llama3_70b").write(path)
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    return path


def test_a_written_file_reads_the_same(tmp_path):
    path = broken(tmp_path, lambda raw: None)
    assert CostModelFile.load(path) == CostModelFile.load("a800_llama3_70b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw["constants"].pop("nic_nbytes_per_second"), "nic_nbytes_per_second"),
        (lambda raw: raw["constants"].update(extra={"value": 1, "source": "x"}), "extra"),
        (lambda raw: raw["constants"]["dram_nbytes"].update(value=0), "dram_nbytes"),
        (lambda raw: raw["constants"]["dram_nbytes"].update(source=""), "source"),
        (lambda raw: raw.update(kind="guessed"), "kind"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, change, message):
    with pytest.raises(InvalidError, match=message):
        CostModelFile.load(broken(tmp_path, change))


def test_an_unknown_name_is_told_what_there_is():
    with pytest.raises(InvalidError, match="a800_llama3_70b"):
        CostModelFile.load("b200")


def test_a_base_below_the_cost_of_a_further_request_is_refused(tmp_path):
    path = broken(tmp_path, lambda raw: raw["constants"]["decode_base_seconds"].update(value=0.001))
    with pytest.raises(InvalidError, match="decode_base_seconds"):
        CostModelFile.load(path).costs.estimator()
