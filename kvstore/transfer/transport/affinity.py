"""How near a peer's rails are to the memory at both ends: own NICs by the routing table, the peer's by its word."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.transfer.segment import Peer
from kvstore.transfer.sysfs import interface_addresses, route_source
from kvstore.transfer.topology import PREFERRED, Topology


class Affinity:
    """Ranks rails for pairs of memory locations, by `topology` of this host and the tiers that peers announce.

    Which own NIC leads to a peer's address is the kernel's decision. It is asked when the peer is first met.
    """

    def __init__(self, topology: Topology):
        self._topology = topology
        self._interfaces = interface_addresses()

    def tiers_of(self, addresses: Sequence[str]) -> dict[str, list[int]]:
        """For every memory here, the tier of the NIC that has each address."""
        return self._topology.tiers([self._interfaces.get(address, "") for address in addresses])

    def ways(self, peer: Peer) -> list[str]:
        """The own NIC that leads to each of the peer's rails; "" if none does, or it is not known."""
        return [self._interfaces.get(route_source(host, port), "") for host, port in peer.rails]

    def rank(self, peer: Peer, place: int, way: str, local: str, remote: str) -> int:
        """Of the peer's rail `place`, reached by the own NIC `way`: the sum of its tiers at both ends."""
        tiers = peer.tiers.get(remote, [])
        there = tiers[place] if place < len(tiers) else PREFERRED
        return self._topology.tier(local, way) + there
