"""What the kernel says of this host's NICs and memory: sysfs for NUMA nodes, netlink for addresses. Linux only."""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstore.transfer.topology import Topology

SYS = Path("/sys")
_ETHERNET = "1"  # ARPHRD_ETHER, in /sys/class/net/NAME/type
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers

_RTM_GETADDR, _RTM_NEWADDR = 22, 20
_NLM_REQUEST_DUMP = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_NLMSGHDR = struct.Struct("=IHHII")
_IFADDRMSG = struct.Struct("=BBBBI")
_RTATTR = struct.Struct("=HH")


def discover(root: Path = SYS) -> Topology:
    """The topology matrix of this host, from the sysfs mounted at `root`.

    Memories are the NUMA nodes, `cpu:N`, and NVIDIA GPUs, `cuda:N` in PCI bus order (as with
    CUDA_DEVICE_ORDER=PCI_BUS_ID). NICs are Ethernet interfaces, but for bridges and members of bonds, and InfiniBand
    devices; a RoCE port appears under both of its names.
    """
    memories: dict[str, int | None] = {f"cpu:{node}": node for node in _numa_nodes(root)}
    memories |= {f"cuda:{i}": _numa_node(gpu) for i, gpu in enumerate(_gpus(root))}
    nics = {path.name: _numa_node(path / "device") for path in [*_ethernet(root), *_infiniband(root)]}
    return Topology.from_nodes(memories, nics)


def _numa_nodes(root: Path) -> list[int]:
    names = [path.name for path in (root / "devices/system/node").glob("node[0-9]*")]
    return sorted(int(name.removeprefix("node")) for name in names) or [0]


def _gpus(root: Path) -> list[Path]:
    return [
        path
        for path in sorted((root / "bus/pci/devices").glob("*"))
        if _text(path / "vendor") == _NVIDIA and _text(path / "class")[:6] in _DISPLAY_CLASSES
    ]


def _ethernet(root: Path) -> Iterator[Path]:
    for path in sorted((root / "class/net").glob("*")):
        is_part = (path / "bridge").exists() or (path / "bonding_slave").exists()
        if _text(path / "type") == _ETHERNET and not is_part:
            yield path


def _infiniband(root: Path) -> list[Path]:
    return sorted((root / "class/infiniband").glob("*"))


def _numa_node(device: Path) -> int | None:
    """None for what has no node: a virtual interface, or a host with one node (-1).

    A virtio NIC has none of its own: its parent, the PCI device, has.
    """
    if not device.exists():
        return None
    here = device.resolve()
    text = _text(here / "numa_node") or _text(here.parent / "numa_node")
    return int(text) if re.fullmatch("[0-9]+", text) else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def interface_addresses() -> dict[str, str]:
    """Address → name of the interface that has it, IPv4 and IPv6, of this network namespace."""
    names = dict(socket.if_nameindex())
    return {address: names[index] for address, index in _addresses() if index in names}


def nic_addresses(devices: Sequence[str]) -> list[str]:
    """One address of each of `devices` that has any: IPv4 before IPv6, none that is valid on its link only."""
    found: dict[str, str] = {}
    usable = [
        each for each in interface_addresses().items() if not ipaddress.ip_address(each[0]).is_link_local
    ]
    for address, device in sorted(usable, key=lambda item: ":" in item[0]):
        found.setdefault(device, address)
    return [found[device] for device in devices if device in found]


def _addresses() -> Iterator[tuple[str, int]]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        size = _NLMSGHDR.size + _IFADDRMSG.size
        header = _NLMSGHDR.pack(size, _RTM_GETADDR, _NLM_REQUEST_DUMP, 1, 0)
        netlink.send(header + _IFADDRMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
        while True:
            data = netlink.recv(1 << 16)
            while data:
                nbytes, kind, *_ = _NLMSGHDR.unpack_from(data)
                if kind in (_NLMSG_DONE, _NLMSG_ERROR):
                    return
                if kind == _RTM_NEWADDR:
                    yield from _address(data[_NLMSGHDR.size : nbytes])
                data = data[_aligned(nbytes) :]


def _address(message: bytes) -> Iterator[tuple[str, int]]:
    family, _, _, _, index = _IFADDRMSG.unpack_from(message)
    found: dict[int, bytes] = {}
    rest = message[_IFADDRMSG.size :]
    while len(rest) >= _RTATTR.size:
        nbytes, kind = _RTATTR.unpack_from(rest)
        found[kind] = rest[_RTATTR.size : nbytes]
        rest = rest[_aligned(max(nbytes, _RTATTR.size)) :]
    raw = found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS)  # they differ on point-to-point links
    if raw and family in (socket.AF_INET, socket.AF_INET6):
        yield socket.inet_ntop(family, raw), index


def _aligned(nbytes: int) -> int:
    return (nbytes + 3) & ~3


def route_source(host: str, port: int) -> str:
    """The local address from which the kernel would reach a numeric address now; "" if it would not."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:
        return ""
