"""Generated traces: readable by the strict reader, repeatable, and like Table 2."""

import pytest

from kvstore.errors import InvalidError
from mooncake_jax.synthetic_trace import KINDS, generate
from mooncake_jax.trace import read_trace, write_trace

LIKE = {"conversation": (12_035, 343, 0.40), "agent": (8_596, 182, 0.59), "document": (15_325, 149, 0.66)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_generated_trace_is_a_trace(tmp_path, kind):
    trace = generate(kind, 400, 200.0, seed=3)
    assert generate(kind, 400, 200.0, seed=3) == trace != generate(kind, 400, 200.0, seed=4)
    write_trace(tmp_path / "t.jsonl", trace)
    assert read_trace(tmp_path / "t.jsonl").requests == trace.requests


@pytest.mark.parametrize("kind", KINDS)
def test_it_resembles_its_row_of_table_2(kind):
    statistics = generate(kind, 4000, 1200.0).statistics
    mean_input, mean_output, cached = LIKE[kind]
    assert statistics.mean_input_tokens == pytest.approx(mean_input, rel=0.25)
    assert statistics.mean_output_tokens == pytest.approx(mean_output, rel=0.1)
    assert statistics.cached_tokens == pytest.approx(cached, abs=0.07)
    assert statistics.span_seconds == pytest.approx(1200.0, rel=0.25)


@pytest.mark.parametrize(("kind", "num", "seconds"), [("chat", 1, 1.0), ("agent", 0, 1.0), ("agent", 1, 0.0)])
def test_what_cannot_be_generated_is_refused(kind, num, seconds):
    with pytest.raises(InvalidError, match=r"expected one of|must be positive"):
        generate(kind, num, seconds)
