"""Drawing of tokens from final activations, the last step of both engines: its compiled programs and its rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import draw as draws
from models import llama, sampling
from models.config import LlamaConfig
from models.draw import Draw
from models.platform import Platform
from mooncake_jax.engine.compiles import program


class Drawing:
    """Programs that draw one token for each of b rows, for every b in `batches`. Owned by its engine's thread."""

    def __init__(
        self, cfg: LlamaConfig, platform: Platform, head_params: llama.Params, batches: Sequence[int]
    ):
        self._cfg, self._platform, self._head_params = cfg, platform, head_params
        self._batches = list(batches)
        self._greedy: dict[int, Callable[..., Any]] = {}
        self._sampled: dict[int, Callable[..., Any]] = {}

    def compile(self) -> None:
        """Compile everything; `warm_up` has yet to run it."""
        cfg, platform = self._cfg, self._platform
        for batch in self._batches:
            x = jax.ShapeDtypeStruct((batch, cfg.d_model), jnp.float32)
            self._greedy[batch] = program(
                functools.partial(_draw_greedy, cfg, platform), self._head_params, x
            )
            self._sampled[batch] = program(
                functools.partial(_draw_sampled, cfg, platform), self._head_params, x, draws.blank(batch)
            )

    def warm_up(self) -> None:
        """Run every program once: its first run costs more than the next ones."""
        for batch in self._batches:
            x = np.zeros((batch, self._cfg.d_model), np.float32)
            for temperature in (0.0, 1.0):
                draw = draws.blank(batch)
                draw.temperature[:] = temperature
                jax.block_until_ready(self.start(x, draw, np.ones(batch, np.bool_)))

    def start(self, x: jax.Array | np.ndarray, draw: Draw, active: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Draw from final activations `[b, D]`: tokens and log probabilities, `[b]` each, on the device.

        `draw` and `active` have at least b rows; rows that are not active may hold anything.
        """
        batch = x.shape[0]
        if np.any(draw.temperature[:batch][active[:batch]] > 0.0):
            return self._sampled[batch](self._head_params, x, Draw(*(column[:batch] for column in draw)))
        return self._greedy[batch](self._head_params, x)


def _draw_greedy(
    cfg: LlamaConfig, platform: Platform, params: llama.Params, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Final activations `[B, D]` → the most likely tokens `[B]` and their log probabilities `[B]`."""
    return sampling.greedy(llama.head(cfg, platform, params, x))


def _draw_sampled(
    cfg: LlamaConfig, platform: Platform, params: llama.Params, x: jax.Array, draw: Draw
) -> tuple[jax.Array, jax.Array]:
    """Final activations `[B, D]` → tokens drawn as `draw` says, and their log probabilities."""
    return sampling.sample(llama.head(cfg, platform, params, x), draw)
