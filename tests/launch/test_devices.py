"""Which devices a process computes on."""

import logging

import jax

from launch import devices as module
from launch.devices import compute_devices, cpu_devices


def test_cores_make_a_power_of_two_of_devices():
    assert [cpu_devices(n) for n in (0, 1, 2, 3, 4, 7, 64)] == [1, 1, 2, 2, 4, 4, 8]


def test_only_devices_that_are_fewer_than_wanted_are_told(caplog, monkeypatch):
    there = jax.local_device_count()
    with caplog.at_level(logging.WARNING):
        assert (
            len(compute_devices(there)) == there
        )  # made before, as by a process that converts and then computes
        assert caplog.messages == []
        monkeypatch.setattr(module, "usable_cores", lambda: 1)
        assert len(compute_devices()) == there
        assert caplog.messages == [f"JAX runs already: it computes on {there} devices, not on 1"]
