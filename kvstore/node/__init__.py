"""A store node: slots of DRAM, who may write and read them, what the directory hears of them."""

from kvstore.node.handles import Lease, Reservation
from kvstore.node.node import Node, NodeConfig

__all__ = ["Lease", "Node", "NodeConfig", "Reservation"]
