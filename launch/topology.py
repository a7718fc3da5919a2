"""Prints this host's topology matrix: which NICs are near which memory.

    python -m launch.topology
    python -m launch.topology --topology=matrix.json   # checks a matrix of one's own

For every memory (`cpu:N` a NUMA node's, `cuda:N` a GPU's) the preferred NICs, then the others. A role takes it by
--topology, as it is or edited.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from launch.flags import define, read_topology
from launch.process import run_main

define("topology")
SYSFS = flags.DEFINE_string("sysfs", "/sys", "Where the kernel's sysfs is mounted.")
FLAGS = flags.FLAGS


def main(_: Sequence[str]) -> None:
    from kvstore.transfer.sysfs import discover

    topology = read_topology(FLAGS.topology) if FLAGS.topology else discover(Path(SYSFS.value))
    print(topology.json())


if __name__ == "__main__":
    run_main(main)
