"""The SSD tier of a store node: objects in a file of slots, named by a journal."""

from kvstore.node.ssd.tier import SsdTier, num_ssd_slots

__all__ = ["SsdTier", "num_ssd_slots"]
