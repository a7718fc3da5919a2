"""From requests to frames: check what the caller gave, group it by destination, cut it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.transfer.batch import Batch, Frame
from kvstore.transfer.buffers import byte_view
from kvstore.transfer.faults import Fault
from kvstore.transfer.request import READ, WRITE, Opcode, TransferRequest
from kvstore.transfer.segment import DEFAULT_LOCATION, Segment
from kvstore.transfer.slices import bounds_reason, cut, out_of_bounds
from kvstore.transfer.status import Path


@dataclass(frozen=True)
class Order:
    """Requests of one submit with one opcode, target and permit. `rows`, `offsets`, `lengths`: int64 `[M]`.

    `rows` are the requests' places in the submit; `views` their local memory as flat bytes.
    """

    opcode: Opcode
    target: Segment
    permit: int
    rows: np.ndarray
    views: list[memoryview]
    offsets: np.ndarray
    lengths: np.ndarray

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum())

    def out_of_bounds(self) -> tuple[np.ndarray, list[str]]:
        """Which requests, by place in this order, miss the segment, and a reason for each."""
        wrong = out_of_bounds(self.offsets, self.lengths, self.target.nbytes)
        name, nbytes = self.target.name, self.target.nbytes
        return wrong, [bounds_reason(self.offsets, self.lengths, i, name, nbytes) for i in wrong.tolist()]

    def without(self, places: np.ndarray) -> Order:
        """The order without some of its requests."""
        return self._pick(np.delete(np.arange(len(self.rows)), places))

    def singles(self) -> Iterator[Order]:
        """An order for each request."""
        for place in range(len(self.rows)):
            yield self._pick(np.array([place]))

    def _pick(self, places: np.ndarray) -> Order:
        views = [self.views[i] for i in places.tolist()]
        return Order(
            self.opcode,
            self.target,
            self.permit,
            self.rows[places],
            views,
            self.offsets[places],
            self.lengths[places],
        )

    def frames(
        self,
        batch: Batch,
        first: int,
        path: Path,
        deadline: float,
        max_nbytes: int,
        location: str = DEFAULT_LOCATION,
        fault: Fault | None = None,
    ) -> list[Frame]:
        """Frames of up to `max_nbytes` that carry the whole order; row 0 is request `first` of the batch.

        `fault`: singles only.
        """
        views = self.views
        if fault is not None and fault.corrupt_byte is not None and self.opcode is WRITE:
            views = [_corrupted(views[0], fault.corrupt_byte)]
        frames = []
        for piece in cut(self.lengths, max_nbytes):
            part = slice(piece.first, piece.last)
            offsets, lengths, pieces = self.offsets[part], self.lengths[part], views[part]
            if len(pieces) == 1:
                offsets, lengths = offsets + piece.start, np.array([piece.nbytes])
                pieces = [pieces[0][piece.start : piece.start + piece.nbytes]]
            indices = self.rows[part] + first
            frame = Frame(
                batch,
                path,
                self.opcode,
                self.target,
                self.permit,
                deadline,
                indices,
                pieces,
                offsets,
                lengths,
                piece.nbytes,
                location,
            )
            if fault is not None:
                frame.delay_seconds, frame.fail = fault.delay_seconds, fault.fail
                if fault.corrupt_byte is not None and self.opcode is READ:
                    at = fault.corrupt_byte - piece.start
                    frame.flip = pieces[0][at : at + 1] if 0 <= at < piece.nbytes else None
            frames.append(frame)
        return frames


def _corrupted(view: memoryview, index: int) -> memoryview:
    copy = bytearray(view)
    copy[index] ^= 0xFF
    return memoryview(copy)


def orders(requests: Sequence[TransferRequest]) -> list[Order]:
    """Checks requests and groups them by opcode, target and permit, in order.

    Raises TypeError or ValueError, which names the request, if one is malformed.
    """
    views, offsets = [], []
    groups: dict[tuple[Opcode, int, int], list[int]] = {}
    opcode, target, permit, members = None, None, None, []
    for row, request in enumerate(requests):
        local = request.local
        if request.target is not target or request.opcode is not opcode or request.permit != permit:
            opcode, target, permit = _destination(row, request)
            members = groups.setdefault((opcode, id(target), permit), [])
        if type(local) is not memoryview:
            raise TypeError(f"request {row}: local is a {type(local).__name__}, expected a memoryview")
        view = local if local.format == "B" and local.ndim == 1 and local.c_contiguous else _flat(row, local)
        if opcode is READ and local.readonly:
            raise ValueError(f"request {row}: READ into a read-only buffer")
        if not 0 <= request.offset < 2**63:
            raise ValueError(f"request {row}: offset {request.offset} is no place in a segment")
        views.append(view)
        offsets.append(request.offset)
        members.append(row)
    all_offsets, all_lengths = np.array(offsets, np.int64), np.array([*map(len, views)], np.int64)
    result = []
    for (opcode, _, permit), members in groups.items():
        rows = np.array(members, np.int64)
        own = views if len(members) == len(views) else [views[i] for i in members]
        result.append(
            Order(
                opcode, requests[members[0]].target, permit, rows, own, all_offsets[rows], all_lengths[rows]
            )
        )
    return result


def _flat(row: int, local: memoryview) -> memoryview:
    try:
        return byte_view(local)
    except ValueError as error:
        raise ValueError(f"request {row}: {error}") from error


def _destination(row: int, request: TransferRequest) -> tuple[Opcode, Segment, int]:
    if not isinstance(request.target, Segment):
        raise TypeError(f"request {row}: target is a {type(request.target).__name__}, expected a Segment")
    if not 0 <= request.permit < 2**63:
        raise ValueError(f"request {row}: permit {request.permit} is not within 0 to 2**63 - 1")
    return Opcode(request.opcode), request.target, request.permit
