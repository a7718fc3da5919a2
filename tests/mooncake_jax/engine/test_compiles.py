import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from mooncake_jax.engine.compiles import binary_runs, buckets, process_compiles, program, use_persistent_cache


def test_every_new_executable_counts_once():
    counter = process_compiles()
    x = np.ones(7, np.float32)
    step = program(lambda x: x * 3, x)
    before = counter.total
    step(x)
    assert counter.total == before
    program(lambda x: x * 5, x)
    assert counter.total == before + 1
    np.asarray(jnp.zeros(11) + 1)  # eager operations compile too
    assert counter.total > before + 1


def test_a_hit_in_the_persistent_cache_counts_too(tmp_path):
    settings = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    old = {name: getattr(jax.config, name) for name in settings}
    compilation_cache.reset_cache()  # of other tests
    try:
        use_persistent_cache(str(tmp_path))
        counter, x = process_compiles(), np.ones(13, np.float32)
        for _ in range(2):
            before = counter.total
            jax.clear_caches()
            program(lambda x: x * 17 + 1, x)
            assert counter.total == before + 1
        assert any(tmp_path.iterdir())
    finally:
        for name, value in old.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_a_program_takes_its_shapes_and_no_others():
    step = program(lambda x: x + 1, np.ones(3, np.float32))
    with pytest.raises(TypeError):
        step(np.ones(4, np.float32))


def test_buckets_double_up_to_the_largest():
    assert buckets(16, 100) == [16, 32, 64, 100]
    assert buckets(1, 1) == [1]


@pytest.mark.parametrize("count", [0, 1, 7, 32, 246])
def test_binary_runs_add_up_from_powers_of_two(count):
    runs = binary_runs(count, 32)
    assert sum(runs) == count
    assert all(run in (1, 2, 4, 8, 16, 32) for run in runs)
    assert len(runs) <= count // 32 + 5
