"""How near a peer's rails are to the memory at both ends: own NICs by the routing table, the peer's by its word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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

    def tiers_of_addresses(self, addresses: Sequence[str]) -> dict[str, list[int]]:
        """For every memory here, the tier of the NIC that has each address."""
        return self._topology.tiers([self._interfaces.get(address, "") for address in addresses])

    def tiers_of_devices(self, devices: Sequence[str]) -> dict[str, list[int]]:
        """For every memory here, the tier of each NIC."""
        return self._topology.tiers(devices)

    def ways(self, peer: Peer) -> list[str]:
        """The own NIC that leads to each of the peer's rails; "" if none does, or it is not known."""
        return [self._interfaces.get(route_source(host, port), "") for host, port in peer.rails]

    def ranks(
        self, ways: Sequence[str], tiers: Mapping[str, Sequence[int]], local: str, remote: str
    ) -> list[int]:
        """Of a peer's rails, reached by the own NICs `ways`, of these `tiers` there: the sum of both ends' tiers."""
        there = list(tiers.get(remote, ()))[: len(ways)]
        there += [PREFERRED] * (len(ways) - len(there))
        return [self._topology.tier(local, way) + far for way, far in zip(ways, there, strict=True)]
