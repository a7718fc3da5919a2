"""Discovery in made-up sysfs trees, and what the kernel of this machine says of its addresses."""

import pytest

from kvstore.transfer.sysfs import discover, interface_addresses, nic_addresses, route_source


@pytest.fixture
def tree(tmp_path):
    """Files by path, and links by `path -> path`, under a root."""

    def make(files, links=()):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(f"{text}\n")
        for link, target in dict(links).items():
            (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / target).mkdir(parents=True, exist_ok=True)
            (tmp_path / link).symlink_to(tmp_path / target)
        return tmp_path

    return make


def nic(name, node, kind="net", arp_type=1):
    card = f"devices/pci0/{name}"
    files = {f"{card}/numa_node": node}
    if kind == "net":
        files[f"class/net/{name}/type"] = arp_type
    return files, {f"class/{kind}/{name}/device": card}


def test_a_host_of_two_nodes_with_ethernet_infiniband_and_gpus(tree):
    files = {f"devices/system/node/node{node}/cpulist": "0" for node in (0, 1)}
    files |= {
        "bus/pci/devices/0000:3b:00.0/vendor": "0x10de",
        "bus/pci/devices/0000:3b:00.0/class": "0x030200",
    }
    files |= {"bus/pci/devices/0000:3b:00.0/numa_node": 0}
    files |= {
        "bus/pci/devices/0000:af:00.0/vendor": "0x10de",
        "bus/pci/devices/0000:af:00.0/class": "0x030200",
    }
    files |= {"bus/pci/devices/0000:af:00.0/numa_node": 1}
    files |= {
        "bus/pci/devices/0000:b0:00.0/vendor": "0x10de",
        "bus/pci/devices/0000:b0:00.0/class": "0x040300",
    }
    files |= {
        "class/net/lo/type": 772,
        "class/net/docker0/type": 1,
        "class/net/docker0/bridge/bridge_id": "x",
    }
    links = {}
    for some in (nic("eth0", 0), nic("eth1", 1), nic("mlx5_0", 1, "infiniband"), nic("ib0", 1, arp_type=32)):
        files |= some[0]
        links |= some[1]
    assert discover(tree(files, links)).matrix == {
        "cpu:0": (["eth0"], ["eth1", "mlx5_0"]),
        "cpu:1": (["eth1", "mlx5_0"], ["eth0"]),
        "cuda:0": (["eth0"], ["eth1", "mlx5_0"]),
        "cuda:1": (["eth1", "mlx5_0"], ["eth0"]),
    }


def test_interfaces_without_a_node_are_near_to_every_memory(tree):
    files = {f"devices/system/node/node{node}/cpulist": "0" for node in (0, 1)}
    files |= {"class/net/veth0/type": 1}
    some = nic("eth0", -1)
    assert discover(tree(files | some[0], some[1])).matrix == {
        "cpu:0": (["eth0", "veth0"], []),
        "cpu:1": (["eth0", "veth0"], []),
    }


def test_a_virtio_nic_has_the_node_of_its_pci_device(tree):
    files = {f"devices/system/node/node{node}/cpulist": "0" for node in (0, 1)}
    files |= {"class/net/eth0/type": 1, "devices/pci0/0000:00:03.0/numa_node": 1}
    root = tree(files, {"class/net/eth0/device": "devices/pci0/0000:00:03.0/virtio2"})
    assert discover(root).matrix == {"cpu:0": ([], ["eth0"]), "cpu:1": (["eth0"], [])}


def test_members_of_a_bond_are_left_out_for_the_bond(tree):
    files = {f"class/net/{name}/type": 1 for name in ("bond0", "eth0", "eth1")}
    files |= {f"class/net/{name}/bonding_slave/state": "active" for name in ("eth0", "eth1")}
    assert discover(tree(files)).matrix == {"cpu:0": (["bond0"], [])}


def test_a_kernel_that_says_nothing_still_has_one_memory(tmp_path):
    assert discover(tmp_path).matrix == {"cpu:0": ([], [])}


def test_addresses_of_this_machine():
    addresses = interface_addresses()
    assert addresses["127.0.0.1"] == "lo"
    assert nic_addresses(["lo", "no-such-nic"]) == ["127.0.0.1"]
    assert route_source("127.0.0.1", 80) == "127.0.0.1"
    assert route_source("a name", 80) == ""
