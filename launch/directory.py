"""The directory of the KVCache store: who holds which block.

    python -m launch.directory --port=9000

It keeps nothing on disk: nodes tell it again after a restart. Ask it for the nodes it knows:

    python -c "from kvstore.messages import DIRECTORY; from kvstore.rpc import Empty, Stub; \\
               print(Stub('127.0.0.1:9000', DIRECTORY).nodes(Empty()))"
"""

from __future__ import annotations

from contextlib import ExitStack

from absl import flags

from kvstore.directory import Directory
from kvstore.rpc import Server
from launch.flags import define
from launch.process import run_role

define("host", "port")
FLAGS = flags.FLAGS


def build(stack: ExitStack) -> tuple[str, str]:
    directory = Directory()
    stack.callback(directory.close)
    server = Server(directory.handlers(), host=FLAGS.host, port=FLAGS.port, max_workers=directory.max_workers)
    stack.callback(server.close)
    return "directory", server.address


if __name__ == "__main__":
    run_role(build)
