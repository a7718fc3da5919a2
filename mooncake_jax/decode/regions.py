"""Which bytes of one buffer are taken: contiguous, first fit. Pure."""

from __future__ import annotations


class Regions:
    """Regions of `[0, nbytes)`, in whole multiples of `alignment`."""

    def __init__(self, nbytes: int, alignment: int):
        if alignment < 1 or nbytes < alignment:
            raise ValueError(f"{nbytes} bytes do not hold one region aligned to {alignment}")
        self.nbytes = nbytes // alignment * alignment
        self._alignment = alignment
        self._free = [(0, self.nbytes)]  # (start, stop), in order, never adjacent
        self._taken: dict[int, int] = {}  # start: stop

    def fits(self, nbytes: int) -> bool:
        """Whether an empty buffer could hold it."""
        return 0 < nbytes <= self.nbytes

    def take(self, nbytes: int) -> int | None:
        """First byte of a region of at least `nbytes`; None if no hole is large enough now."""
        if nbytes < 1:
            raise ValueError(f"a region of {nbytes} bytes")
        size = -(-nbytes // self._alignment) * self._alignment
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[i : i + 1] = [(start + size, stop)] if stop - start > size else []
                self._taken[start] = start + size
                return start
        return None

    def give_back(self, start: int) -> None:
        """The region that `take` returned `start` for is free again. Raises KeyError if it is not taken."""
        stop = self._taken.pop(start)
        merged: list[tuple[int, int]] = []
        for hole in sorted([*self._free, (start, stop)]):
            if merged and merged[-1][1] == hole[0]:
                merged[-1] = (merged[-1][0], hole[1])
            else:
                merged.append(hole)
        self._free = merged

    @property
    def used_nbytes(self) -> int:
        return sum(stop - start for start, stop in self._taken.items())
