"""The equality rule: when an answer of the served system counts as equal to the oracle's.

The oracle is teacher-forced along the answer, so the rule holds after an allowed difference too. In float32
log probabilities agree within 1e-3 and a token may differ from the oracle's best only where its two best
are less than 2e-3 apart; in bfloat16 both bounds are 0.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class TokenScores(NamedTuple):
    """What the oracle thinks of given next tokens, `[T]` each."""

    logprobs: np.ndarray  # float32: log probability of the given token
    best: np.ndarray  # int32: the most likely token
    margins: np.ndarray  # float32: by how much its log probability leads the runner-up's


class Tolerance(NamedTuple):
    """Bounds of one dtype, in nats."""

    logprob: float  # |Δ log probability| of a chosen token, at most
    margin: float  # another token than the oracle's best is allowed where its lead is smaller


TOLERANCES = {"float32": Tolerance(1e-3, 2e-3), "bfloat16": Tolerance(0.2, 0.2)}


@dataclass(frozen=True)
class EqualityReport:
    """Outcome of comparing one answer. `first_violation`: where and why it is not equal, or None."""

    num_tokens: int
    max_abs_dlogprob: float
    mean_abs_dlogprob: float
    num_allowed_flips: int  # tokens that differ from the oracle's best, at margins that allow it
    first_violation: str | None

    @property
    def equal(self) -> bool:
        return self.first_violation is None


def compare(
    tokens: Sequence[int] | np.ndarray,
    logprobs: Sequence[float] | np.ndarray,
    oracle: TokenScores,
    dtype: str,
    *,
    greedy: bool = True,
) -> EqualityReport:
    """Compare an answer's `tokens` and `logprobs` `[T]` with the oracle's scores of these same tokens.

    With `greedy` False (sampled answers) only log probabilities are compared. Raises ValueError for lengths
    that differ or an unknown dtype.
    """
    if dtype not in TOLERANCES:
        raise ValueError(f"no tolerance for dtype {dtype!r}: expected one of {sorted(TOLERANCES)}")
    chosen, given = np.asarray(tokens, np.int64), np.asarray(logprobs, np.float64)
    if not len(chosen) == len(given) == len(oracle.logprobs) or not len(chosen):
        raise ValueError(
            f"{len(chosen)} tokens, {len(given)} log probabilities, {len(oracle.logprobs)} oracle scores"
        )
    tolerance = TOLERANCES[dtype]
    difference = np.abs(given - oracle.logprobs)
    flipped = (chosen != oracle.best) & greedy
    forbidden = flipped & ~(oracle.margins < tolerance.margin)
    wrong = ~(difference <= tolerance.logprob)  # catches NaN too
    violation = None
    if np.any(wrong | forbidden):
        i = int(np.argmax(wrong | forbidden))
        violation = f"token {i} ({chosen[i]}): "
        if forbidden[i]:
            violation += f"the oracle's best is {oracle.best[i]}, by a margin of {oracle.margins[i]:.3g}"
        else:
            violation += f"log probability {given[i]:.6g}, the oracle's is {oracle.logprobs[i]:.6g}"
    return EqualityReport(
        num_tokens=len(chosen),
        max_abs_dlogprob=float(difference.max()),
        mean_abs_dlogprob=float(difference.mean()),
        num_allowed_flips=int(np.sum(flipped & ~forbidden)),
        first_violation=violation,
    )
