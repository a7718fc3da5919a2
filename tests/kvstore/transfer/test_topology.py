import json

import pytest

from kvstore.transfer.topology import PREFERRED, SECONDARY, UNLISTED, Topology


def test_nics_on_the_memorys_node_come_first_and_those_of_unknown_node_are_near_to_all():
    topology = Topology.from_nodes(
        {"cpu:0": 0, "cpu:1": 1, "cuda:0": 1, "cuda:1": None}, {"eth0": 0, "mlx5_0": 1, "veth0": None}
    )
    assert topology.matrix == {
        "cpu:0": (["eth0", "veth0"], ["mlx5_0"]),
        "cpu:1": (["mlx5_0", "veth0"], ["eth0"]),
        "cuda:0": (["mlx5_0", "veth0"], ["eth0"]),
        "cuda:1": (["eth0", "mlx5_0", "veth0"], []),
    }
    assert topology.devices == ["eth0", "mlx5_0", "veth0"]


def test_tiers():
    topology = Topology({"cpu:0": (["a"], ["b"])})
    tiers = [topology.tier("cpu:0", device) for device in ("a", "b", "c", "")]
    assert tiers == [PREFERRED, SECONDARY, UNLISTED, PREFERRED]
    assert topology.tier("cuda:3", "b") == PREFERRED  # nothing is known of that memory
    assert topology.tiers(["b", "", "a"]) == {"cpu:0": [1, 0, 0]}


def test_json_is_the_papers_and_comes_back():
    topology = Topology({"cpu:0": (["mlx5_0"], ["mlx5_1", "eth0"]), "cuda:0": ([], [])})
    assert json.loads(topology.json()) == {
        "cpu:0": [["mlx5_0"], ["mlx5_1", "eth0"]],
        "cuda:0": [[], []],
    }
    assert Topology.parse(topology.json()) == topology


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[]", "Expected `object`"),
        ('{"cpu:0": [["a"]]}', "length 2"),
        ('{"cpu:0": ["a", "b"]}', "Expected `array`"),
        ('{"cpu:0": [["a"], ["a"]]}', "'cpu:0' names a NIC twice"),
        ("{", "truncated"),
    ],
)
def test_a_malformed_matrix_is_refused_with_its_fault(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        Topology.parse(text)
