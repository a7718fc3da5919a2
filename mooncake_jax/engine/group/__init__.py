"""A prefill engine whose stages are in several processes that `jax.distributed` joined.

1. Members join the server's group (`messages`); when all are there, an epoch begins: they form one JAX, each places its
   stages' layers, compiles, and says that it is ready.
2. The server, which never joins, runs the pipeline (`mooncake_jax.engine.pipeline_prefill`): it sends every tick to all
   members; new KV comes back into its landing memory by one-sided writes.
3. A member that ends, is silent or reports an error ends the epoch: the server's call raises EngineLostError, every other
   member ends its process, and the next epoch begins when all have joined again.
"""
