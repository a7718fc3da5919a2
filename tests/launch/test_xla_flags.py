"""XLA_FLAGS of the user: kept, or refused with the word that is wrong (case 59)."""

import os

import pytest

from launch.devices import check_xla_flags
from launch.process import UsageError


@pytest.mark.parametrize(
    "flags", ["", "  ", "--xla_gpu_enable_latency_hiding_scheduler=true --xla_cpu_foo=1"]
)
def test_flags_are_left_as_they_are(monkeypatch, flags):
    monkeypatch.setenv("XLA_FLAGS", flags)
    check_xla_flags()
    assert os.environ["XLA_FLAGS"] == flags


@pytest.mark.parametrize("word", ["–xla_dump_to=x", "-xla_dump_to=x", "xla_dump_to", "--xla—dump"])
def test_what_is_no_flag_is_named(monkeypatch, word):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_cpu_foo=1 {word}")
    with pytest.raises(UsageError, match="plain hyphens") as refused:
        check_xla_flags()
    assert repr(word) in str(refused.value)
