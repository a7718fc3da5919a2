"""Blocks of generated tokens on their way to the home node: the next turn of a conversation reuses them."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvstore.block import BlockFormat, chain_keys
from kvstore.errors import StoreError
from kvstore.node import Node

log = logging.getLogger(__name__)


class AnswerKeys:
    """The keys of a prompt's blocks continued over its answer: a block's key is known when its tokens are.

    Pure.
    """

    def __init__(self, root: bytes, prompt: Sequence[int], block_tokens: int):
        keys = chain_keys(root, prompt, block_tokens)
        self._block_tokens = block_tokens
        self._parent = keys[-1] if keys else root
        self._tail = list(prompt[len(keys) * block_tokens :])

    def feed(self, token: int) -> bytes | None:
        """`token` follows; the key of the block that it fills, if it fills one."""
        self._tail.append(token)
        if len(self._tail) < self._block_tokens:
            return None
        (self._parent,) = chain_keys(self._parent, self._tail, self._block_tokens)
        self._tail = []
        return self._parent


class _Save(NamedTuple):
    key: bytes
    block: np.ndarray


class AnswerSaver:
    """One thread that copies blocks to the home node.

    With too many waiting, further ones are dropped and counted.
    """

    def __init__(self, home: Node, block_format: BlockFormat, max_blocks: int):
        self._home, self._format, self._max_blocks = home, block_format, max_blocks
        self._queue: queue.SimpleQueue[_Save | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_pending = 0
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="answer-saver")
        self._thread.start()

    @property
    def num_pending(self) -> int:
        """Blocks taken and not yet at home."""
        return self._num_pending

    @property
    def num_dropped(self) -> int:
        """Blocks not kept: too many waited, or the home node had no room."""
        return self._num_dropped

    def save(self, key: bytes, extract: Callable[[], np.ndarray]) -> None:
        """Takes the block that `extract` returns, `[L, K, 2, Z, H]`, an array of its own; never waits.

        Without room it is not even extracted. One thread calls this. Raises what `extract` raises.
        """
        if self._num_pending >= self._max_blocks:
            with self._lock:
                self._num_dropped += 1
            return
        block = extract()
        with self._lock:
            self._num_pending += 1
        self._queue.put(_Save(key, block))

    def close(self) -> None:
        """Saves what was taken, then ends."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (save := self._queue.get()) is not None:
            try:
                dropped = not self._put(save)
            except StoreError as error:
                log.warning("a block of an answer was not kept: %s", error)
                dropped = True
            except Exception:  # the next block may do better
                log.exception("a block of an answer was not kept")
                dropped = True
            with self._lock:
                self._num_pending -= 1
                self._num_dropped += dropped

    def _put(self, save: _Save) -> bool:
        with self._home.reserve([save.key], self._format.nbytes, self._format.group_nbytes) as slots:
            if not slots.accepted[0]:
                return slots.reasons[0] in ("present", "writing")
            slot = np.frombuffer(slots.buffer(0), np.uint8)
            slot[:] = np.ascontiguousarray(save.block).reshape(-1).view(np.uint8)
            slots.commit(0)
        return True
