import numpy as np
import pytest

from mooncake_jax.equality import TokenScores, compare

ORACLE = TokenScores(
    logprobs=np.array([-1.0, -2.0, -0.5], np.float32),
    best=np.array([7, 8, 9], np.int32),
    margins=np.array([0.5, 0.001, 0.1], np.float32),
)


def test_equal_within_tolerance():
    report = compare([7, 8, 9], [-1.0005, -2.0, -0.5], ORACLE, "float32")
    assert report.equal
    assert report.num_allowed_flips == 0
    assert report.max_abs_dlogprob == pytest.approx(5e-4, rel=1e-3)
    assert report.mean_abs_dlogprob == pytest.approx(5e-4 / 3, rel=1e-3)


def test_a_flip_is_allowed_only_at_a_small_margin():
    assert compare([7, 3, 9], [-1.0, -2.0, -0.5], ORACLE, "float32").num_allowed_flips == 1
    report = compare([7, 8, 3], [-1.0, -2.0, -0.5], ORACLE, "float32")
    assert not report.equal
    assert "token 2 (3)" in report.first_violation
    assert "best is 9" in report.first_violation
    assert compare([7, 8, 3], [-1.0, -2.0, -0.5], ORACLE, "bfloat16").num_allowed_flips == 1
    assert not compare([3, 8, 9], [-1.0, -2.0, -0.5], ORACLE, "bfloat16").equal


def test_log_probabilities_decide_even_when_tokens_agree():
    report = compare([7, 8, 9], [-1.0, -2.0, -0.502], ORACLE, "float32")
    assert not report.equal
    assert "token 2" in report.first_violation
    assert compare([7, 8, 9], [-1.0, -2.0, -0.502], ORACLE, "bfloat16").equal
    assert not compare([7, 8, 9], [-1.0, -2.0, -0.71], ORACLE, "bfloat16").equal
    assert not compare([7, 8, 9], [-1.0, float("nan"), -0.5], ORACLE, "bfloat16").equal


def test_sampled_tokens_need_not_be_the_best():
    assert compare([1, 2, 3], [-1.0, -2.0, -0.5], ORACLE, "float32", greedy=False).equal


def test_malformed_comparisons_are_errors():
    with pytest.raises(ValueError, match="2 tokens"):
        compare([7, 8], [-1.0, -2.0], ORACLE, "float32")
    with pytest.raises(ValueError, match="float16"):
        compare([7], [-1.0], ORACLE, "float16")
