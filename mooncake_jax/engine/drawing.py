"""Drawing of tokens from final activations, the last step of both engines: its compiled programs, and on the
device what penalties look back at."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models import draw as draws
from models import llama, sampling
from models.config import LlamaConfig
from models.draw import Draw
from models.platform import Platform
from mooncake_jax.engine.compiles import program
from mooncake_jax.engine.contract import DrawnTokens, PromptScores

_SCORED_ROWS = 16  # of a tile, scored by one run of a program: logits of a whole tile would be large


class _Programs(NamedTuple):
    """By batch size."""

    greedy: dict[int, Callable[..., Any]]
    drawn: dict[int, Callable[..., Any]]
    remember: Callable[..., Any]
    score: Callable[..., Any] | None


class Drawing:
    """Draws one token for each of b rows, for every b in `batches`. Owned by its engine's thread.

    A batch whose rows all want their most likely token takes the short program; any other batch takes the one
    program that can do everything.
    """

    def __init__(
        self,
        cfg: LlamaConfig,
        platform: Platform,
        head_params: llama.Params,
        *,
        batches: Sequence[int],
        scores: bool = False,
        place: Callable[[np.ndarray], jax.Array] = jax.device_put,
    ):
        """`scores`: whether `score` will be used. `place` puts state onto the devices of `head_params`."""
        self._cfg, self._platform, self._head_params = cfg, platform, head_params
        self._batches, self._scores, self._place = list(batches), scores, place
        self._programs: _Programs | None = None
        self.reset()

    def compile(self) -> None:
        """Compile everything, once."""
        cfg, platform, head = self._cfg, self._platform, self._head_params
        greedy, drawn, score = {}, {}, None
        for batch in self._batches:
            x = jax.ShapeDtypeStruct((batch, cfg.d_model), jnp.float32)
            active = np.zeros(batch, np.bool_)
            greedy[batch] = program(functools.partial(_draw_greedy, cfg, platform), head, x)
            drawn[batch] = program(
                functools.partial(_draw, cfg, platform),
                head,
                x,
                draws.blank(batch),
                active,
                self._seen,
                donate=[4],
            )
        if self._scores:
            x = jax.ShapeDtypeStruct((_SCORED_ROWS, cfg.d_model), jnp.float32)
            targets = np.zeros(_SCORED_ROWS, np.int32)
            score = program(functools.partial(_score, cfg, platform), head, x, targets)
        row = np.zeros(cfg.vocab_size, np.int32)
        remember = program(_put_row, self._seen, row, np.int32(0), donate=[0])
        self._programs = _Programs(greedy, drawn, remember, score)

    def warm_up(self) -> None:
        """Run every program once: its first run costs more than the next ones."""
        D = self._cfg.d_model
        for batch in self._batches:
            for temperature in (0.0, 1.0):
                draw = draws.blank(batch)
                draw.temperature[:] = temperature
                self.finish(self.start(np.zeros((batch, D), np.float32), draw, np.ones(batch, np.bool_)))
        if self._scores:
            self.score(np.zeros((1, D), np.float32), np.zeros(1, np.int32))
        self.remember(0, [], [])
        self.reset()

    def reset(self) -> None:
        """Forget everything, also state that a failed step has consumed."""
        self._seen = self._place(np.zeros((self._batches[-1], self._cfg.vocab_size), np.int32))

    def remember(self, row: int, prompt: Sequence[int] | np.ndarray, drawn: Sequence[int]) -> None:
        """What penalties of `row` look back at from now on; tokens that it draws are added by themselves."""
        V = self._cfg.vocab_size
        seen = 2 * np.bincount(np.asarray(drawn, np.int64), minlength=V).astype(np.int32)
        seen[np.asarray(prompt, np.int64)] |= 1
        self._seen = self._compiled.remember(self._seen, seen, np.int32(row))
        jax.block_until_ready(self._seen)  # the device reads `seen` in place

    def start(self, x: jax.Array | np.ndarray, draw: Draw, active: np.ndarray) -> tuple[jax.Array, ...]:
        """Draw from final activations `[b, D]`, on the device: give what this returns to `finish`.

        `draw` and `active` have at least b rows, and stay unchanged until then; rows that are not active may
        hold anything.
        """
        batch = x.shape[0]
        draw, active = Draw(*(column[:batch] for column in draw)), active[:batch]
        if draws.is_plain(draw, active):
            return self._compiled.greedy[batch](self._head_params, x)
        *drawn, self._seen = self._compiled.drawn[batch](self._head_params, x, draw, active, self._seen)
        if np.any(draw.num_top[active] > 0):
            return tuple(drawn)
        return tuple(drawn[:2])

    @staticmethod
    def finish(drawn: tuple[jax.Array, ...]) -> DrawnTokens:
        """What `start` began, `[b]` each."""
        return DrawnTokens(*map(np.asarray, drawn))

    def score(self, x: np.ndarray, targets: np.ndarray) -> PromptScores:
        """How likely each of `targets` `[T]` was after the first T rows of activations `[≥ T, D]`."""
        if self._compiled.score is None:
            raise RuntimeError("drawing: made without scores")
        T, parts = len(targets), []
        for first in range(0, T, _SCORED_ROWS):
            stop = min(first + _SCORED_ROWS, T)
            rows = np.zeros((_SCORED_ROWS, x.shape[1]), np.float32)
            wanted = np.zeros(_SCORED_ROWS, np.int32)
            rows[: stop - first], wanted[: stop - first] = x[first:stop], targets[first:stop]
            scored = self._compiled.score(self._head_params, rows, wanted)
            parts.append([np.asarray(column)[: stop - first] for column in scored])
        return PromptScores(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    @property
    def _compiled(self) -> _Programs:
        if self._programs is None:
            raise RuntimeError("drawing: compile() comes before the first use")
        return self._programs


def _draw_greedy(
    cfg: LlamaConfig, platform: Platform, params: llama.Params, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Final activations `[B, D]` → the most likely tokens `[B]` and their log probabilities `[B]`."""
    return sampling.greedy(llama.head(cfg, platform, params, x))


def _draw(
    cfg: LlamaConfig,
    platform: Platform,
    params: llama.Params,
    x: jax.Array,
    draw: Draw,
    active: jax.Array,
    seen: jax.Array,
) -> tuple[jax.Array, ...]:
    """Final activations `[B, D]` → the fields of `sampling.Drawn`, and `seen` `[≥ B, V]` with what was drawn."""
    logits = llama.head(cfg, platform, params, x)
    drawn = sampling.sample(logits, draw, seen, row_by_row=platform.draws_row_by_row)
    return *drawn, sampling.remembered(seen, drawn.token, active)


def _put_row(seen: jax.Array, row: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(seen, row[None], index, 0)


def _score(
    cfg: LlamaConfig,
    platform: Platform,
    params: llama.Params,
    x: jax.Array,
    targets: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log probabilities of `targets` `[n]` after rows `x` `[n, D]`, and the most likely tokens."""
    logits = llama.head(cfg, platform, params, x)
    best, tokens = sampling.largest(logits, min(draws.MAX_TOP, cfg.vocab_size))
    log_sum = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return sampling.log_probability(logits, targets), tokens, best - log_sum
