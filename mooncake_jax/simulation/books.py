"""The Conductor's view of a simulated cluster, written as placements and ends come.

A real Conductor learns of them by heartbeats and end reports, a second late; here news is exact and at once.
"""

from __future__ import annotations

from mooncake_jax.conductor.view import ClusterView, DecodeRow, PrefillRow

_ANY_LENGTH = 1 << 40


class Books:
    """A `ClusterView` and what its columns are sums of."""

    def __init__(self, num_prefill: int, num_decode: int, *, decode_slots: int, decode_tokens: int):
        self.view = ClusterView()
        for slot in range(num_prefill):
            self.view.put_prefill(slot, PrefillRow(f"p{slot}", True, _ANY_LENGTH, 1, 0, 0.0, 1.0))
        for slot in range(num_decode):
            row = DecodeRow(f"d{slot}", True, _ANY_LENGTH, decode_slots, 0, 0, 0, decode_tokens)
            self.view.put_decode(slot, row)
        self._prefill, self._decode = self.view.prefill, self.view.decode
        self._num_prefill = [0] * num_prefill
        self._queued_seconds = [0.0] * num_prefill  # forecasts of what has not begun
        self._num_decode = [0] * num_decode
        self._kv_tokens = [0] * num_decode
        self._committed_tokens = [0] * num_decode

    def place(self, prefill: int, seconds: float, free_at: float) -> None:
        """A prompt that will take `seconds` goes to `prefill`, whose next pass can begin at `free_at`."""
        self._num_prefill[prefill] += 1
        self._queued_seconds[prefill] += seconds
        self._prefill.num_requests[prefill] = self._num_prefill[prefill]
        self._prefill.busy_until[prefill] = free_at + self._queued_seconds[prefill]

    def begin(self, prefill: int, seconds: float, free_at: float) -> None:
        """Prompts that were to take `seconds` have begun; the next pass can begin at `free_at`."""
        self._queued_seconds[prefill] -= seconds
        self._prefill.busy_until[prefill] = free_at + self._queued_seconds[prefill]

    def prefilled(self, prefill: int, num: int) -> None:
        """`num` prompts are done."""
        self._num_prefill[prefill] -= num
        self._prefill.num_requests[prefill] = self._num_prefill[prefill]

    def reserve(self, decode: int, num_tokens: int, total_tokens: int) -> None:
        """A prompt of `num_tokens` will decode there, to `total_tokens` with its answer."""
        self._add(decode, 1, num_tokens, total_tokens)

    def release(self, decode: int, num_tokens: int, total_tokens: int) -> None:
        """It is over, or goes elsewhere."""
        self._add(decode, -1, -num_tokens, -total_tokens)

    def die(self, role: str, slot: int) -> None:
        """The instance takes no more."""
        (self._prefill if role == "prefill" else self._decode).alive[slot] = False

    def _add(self, decode: int, num: int, num_tokens: int, total_tokens: int) -> None:
        self._num_decode[decode] += num
        self._kv_tokens[decode] += num_tokens
        self._committed_tokens[decode] += total_tokens
        columns = self._decode
        columns.num_requests[decode] = self._num_decode[decode]
        columns.kv_tokens[decode] = self._kv_tokens[decode]
        columns.committed_tokens[decode] = self._committed_tokens[decode]
