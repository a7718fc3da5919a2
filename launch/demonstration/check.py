"""Is every answer the one that a single process would have given?"""

from __future__ import annotations

from collections.abc import Sequence

from launch.demonstration.client import Exchange
from launch.flags import keep_compiled_programs
from mooncake_jax.equality import EqualityReport, compare


def check(
    exchanges: Sequence[Exchange], source: str, dtype: str, max_tokens: int, compile_cache: str
) -> list[EqualityReport]:
    """Scores each answer with the monolithic engine, by the equality rule of `dtype`."""
    from launch.monolith import load_monolith

    keep_compiled_programs(compile_cache)
    monolith = load_monolith(source, dtype, max_tokens, for_scores=True)
    return [
        compare(one.answer, one.logprobs, monolith.score(one.prompt, one.answer), dtype) for one in exchanges
    ]
