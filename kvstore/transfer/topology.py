"""Which NICs are near which memory: the paper's topology matrix, and what of it a peer has to know.

`{"cpu:0": [[preferred NICs], [secondary NICs]], …}`: for every kind of memory the NICs on its NUMA node, then the
others. A NIC whose node is not known is as near to one memory as to another: preferred by all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

Matrix = dict[str, tuple[list[str], list[str]]]
PREFERRED, SECONDARY, UNLISTED = range(3)


class Topology(msgspec.Struct, frozen=True):
    """The matrix of one host. `matrix[location]`: preferred and secondary NICs, by the kernel's names."""

    matrix: Matrix

    def tier(self, location: str, device: str) -> int:
        """How far a NIC is from memory; PREFERRED where nothing is known of either."""
        if location not in self.matrix or not device:
            return PREFERRED
        preferred, secondary = self.matrix[location]
        return PREFERRED if device in preferred else SECONDARY if device in secondary else UNLISTED

    def tiers(self, devices: Sequence[str]) -> dict[str, list[int]]:
        """For every location, the tier of each of `devices`."""
        return {place: [self.tier(place, device) for device in devices] for place in self.matrix}

    @property
    def devices(self) -> list[str]:
        """Every NIC once, in order."""
        return sorted({name for lists in self.matrix.values() for names in lists for name in names})

    def json(self) -> str:
        """The matrix as JSON, a line per location."""
        lines = [f"  {_json(place)}: {_json(lists)}" for place, lists in self.matrix.items()]
        return "{\n" + ",\n".join(lines) + "\n}"

    @classmethod
    def parse(cls, text: str | bytes) -> Topology:
        """From the JSON of a matrix. Raises ValueError that says what is wrong where."""
        try:
            topology = cls(msgspec.json.decode(text, type=Matrix))
        except msgspec.MsgspecError as error:
            raise ValueError(
                f"a topology is a JSON object of [[preferred], [secondary]] lists: {error}"
            ) from error
        for place, (preferred, secondary) in topology.matrix.items():
            names = preferred + secondary
            if len(set(names)) < len(names):
                raise ValueError(f"topology: {place!r} names a NIC twice")
        return topology

    @classmethod
    def from_nodes(cls, memories: Mapping[str, int | None], nics: Mapping[str, int | None]) -> Topology:
        """From the NUMA node of each memory and NIC, None where it is not known."""
        matrix: Matrix = {}
        for place, node in memories.items():
            near = [name for name, its in nics.items() if its is None or node is None or its == node]
            matrix[place] = (near, [name for name in nics if name not in near])
        return cls(matrix)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
