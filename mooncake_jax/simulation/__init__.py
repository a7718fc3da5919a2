"""A cluster in simulated time: the running system's decisions, on machines that a cost model describes.

Prefix index, Algorithm 1, policies, estimators, admission and eviction are those of the Conductor and the store; only
machines, networks and queues are made up here. All figures that come out are simulated and have to say so.
"""

from mooncake_jax.simulation.cluster import Cluster, simulate
from mooncake_jax.simulation.config import ClusterConfig, CoupledConfig, Failure
from mooncake_jax.simulation.coupled import CoupledCluster
from mooncake_jax.simulation.ledger import Outcomes, State, UnaccountedError
from mooncake_jax.simulation.workload import Workload

__all__ = [
    "Cluster",
    "ClusterConfig",
    "CoupledCluster",
    "CoupledConfig",
    "Failure",
    "Outcomes",
    "State",
    "UnaccountedError",
    "Workload",
    "simulate",
]
