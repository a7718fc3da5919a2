"""The Conductor's view of a simulated cluster, from the placements and ends that it is told of.

A real Conductor learns of them by heartbeats and end reports, a second late; here news is exact and at once.
"""

from __future__ import annotations

from mooncake_jax.conductor.view import ClusterView, DecodeRow, PrefillRow
from mooncake_jax.messages import Role

_ANY_LENGTH = 1 << 40


class Books:
    """What is where, by instance; `view()` writes the rows that changed."""

    def __init__(self, num_prefill: int, num_decode: int, *, decode_slots: int, decode_tokens: int):
        self._view = ClusterView()
        self._decode_slots, self._decode_tokens = decode_slots, decode_tokens
        self._names: dict[Role, list[str]] = {
            "prefill": [f"p{slot}" for slot in range(num_prefill)],
            "decode": [f"d{slot}" for slot in range(num_decode)],
        }
        self._dead: dict[Role, set[int]] = {"prefill": set(), "decode": set()}
        self._factor: dict[Role, list[float]] = {"prefill": [1.0] * num_prefill, "decode": [1.0] * num_decode}
        self._num_prefill = [0] * num_prefill
        self._queued_seconds = [0.0] * num_prefill  # forecasts of what has not begun
        self._free_at = [0.0] * num_prefill
        self._num_decode = [0] * num_decode
        self._kv_tokens = [0] * num_decode
        self._committed_tokens = [0] * num_decode
        self._changed_prefill: set[int] = set()
        self._changed_decode: set[int] = set()
        for slot in range(num_prefill):
            self._put_prefill(slot)
        for slot in range(num_decode):
            self._put_decode(slot)

    def view(self) -> ClusterView:
        """The rows as they are now."""
        for slot in self._changed_prefill:
            self._put_prefill(slot)
        self._changed_prefill.clear()
        for slot in self._changed_decode:
            self._put_decode(slot)
        self._changed_decode.clear()
        return self._view

    def place(self, prefill: int, seconds: float, free_at: float) -> None:
        """A prompt that will take `seconds` goes to `prefill`, whose next pass can begin at `free_at`."""
        self._num_prefill[prefill] += 1
        self._queued_seconds[prefill] += seconds
        self._free_at[prefill] = free_at
        self._changed_prefill.add(prefill)

    def begin(self, prefill: int, seconds: float, free_at: float) -> None:
        """Prompts that were to take `seconds` have begun; the next pass can begin at `free_at`."""
        self._queued_seconds[prefill] -= seconds
        self._free_at[prefill] = free_at
        self._changed_prefill.add(prefill)

    def prefilled(self, prefill: int, num: int) -> None:
        """`num` prompts are done."""
        self._num_prefill[prefill] -= num
        self._changed_prefill.add(prefill)

    def reserve(self, decode: int, num_tokens: int, total_tokens: int) -> None:
        """A prompt of `num_tokens` will decode there, to `total_tokens` with its answer."""
        self._add(decode, 1, num_tokens, total_tokens)

    def release(self, decode: int, num_tokens: int, total_tokens: int) -> None:
        """It is over, or goes elsewhere."""
        self._add(decode, -1, -num_tokens, -total_tokens)

    def die(self, role: Role, slot: int) -> None:
        """The instance takes no more."""
        self._dead[role].add(slot)
        (self._changed_prefill if role == "prefill" else self._changed_decode).add(slot)

    def learn(self, role: Role, slot: int, factor: float) -> None:
        """What the instance does takes `factor` times what the model says."""
        self._factor[role][slot] = factor
        (self._changed_prefill if role == "prefill" else self._changed_decode).add(slot)

    def _put_prefill(self, slot: int) -> None:
        until = self._free_at[slot] + self._queued_seconds[slot]
        name, alive = self._names["prefill"][slot], slot not in self._dead["prefill"]
        factor = self._factor["prefill"][slot]
        row = PrefillRow(name, alive, _ANY_LENGTH, 1, self._num_prefill[slot], until, factor)
        self._view.put_prefill(slot, row)

    def _put_decode(self, slot: int) -> None:
        row = DecodeRow(
            self._names["decode"][slot],
            slot not in self._dead["decode"],
            _ANY_LENGTH,
            self._decode_slots,
            self._num_decode[slot],
            self._kv_tokens[slot],
            self._committed_tokens[slot],
            self._decode_tokens,
            self._factor["decode"][slot],
        )
        self._view.put_decode(slot, row)

    def _add(self, decode: int, num: int, num_tokens: int, total_tokens: int) -> None:
        self._num_decode[decode] += num
        self._kv_tokens[decode] += num_tokens
        self._committed_tokens[decode] += total_tokens
        self._changed_decode.add(decode)
