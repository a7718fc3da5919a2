"""The instances that have registered: one pool of one fingerprint, a view slot and the last load of each."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.errors import InvalidError, StaleError
from mooncake_jax.messages import InstanceInfo, InstanceLoad, Role

_NUM_REPLACED = 16


@dataclass(slots=True, eq=False)
class Registered:
    """One instance that lives. `factor`: measured over modelled time, of a prefill or of a decode step; at first what a
    group of X nodes would take if they shared a node's work without a loss."""

    info: InstanceInfo
    load: InstanceLoad
    beaten_at: float
    slot: int
    factor: float = 1.0
    served_at: float = -math.inf  # when a prompt last ended here

    @property
    def name(self) -> str:
        return self.info.instance.name


class Instances:
    """Registered instances by name. Slots are per role; those of instances that left are given again."""

    def __init__(self) -> None:
        self._by_name: dict[str, Registered] = {}
        self._by_slot: dict[Role, list[Registered | None]] = {"prefill": [], "decode": []}
        self._replaced: dict[str, deque[int]] = {}
        self.prefill_names: list[str] = []  # by view slot; "" where one is free
        self.prefill_homes: list[str] = []  # their home nodes, likewise

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Registered]:
        return iter(self._by_name.values())

    def get(self, name: str) -> Registered | None:
        return self._by_name.get(name)

    def at(self, role: Role, slot: int) -> Registered:
        """The instance in a view slot. Raises KeyError for a free slot."""
        instance = self._by_slot[role][slot]
        if instance is None:
            raise KeyError(f"{role} slot {slot} is free")
        return instance

    def of(self, role: Role) -> list[Registered | None]:
        """By view slot; None where a slot is free."""
        return self._by_slot[role]

    @property
    def pool(self) -> InstanceInfo | None:
        """Any instance: they all agree on fingerprint and format."""
        return next(iter(self._by_name.values())).info if self._by_name else None

    @property
    def pool_fingerprint(self) -> bytes:
        """b"" while there is no instance."""
        return self.pool.fingerprint if self.pool else b""

    def check(self, info: InstanceInfo) -> None:
        """Raises InvalidError for a fingerprint or format unlike the pool's, StaleError if replaced."""
        name, epoch = info.instance.name, info.instance.epoch
        if self.was_replaced(name, epoch):
            raise StaleError(
                f"instance {name!r} of epoch {epoch:x} was replaced by a newer process of that name; "
                "stop one of them"
            )
        if info.num_slots < 1 or info.max_tokens < 1:
            raise InvalidError(
                f"instance {name!r}: num_slots {info.num_slots} and max_tokens {info.max_tokens} "
                "must be positive"
            )
        others = [other.info for other in self if other.name != name]
        if not others:
            return
        pool = others[0]
        if info.fingerprint != pool.fingerprint:
            raise InvalidError(
                f"instance {name!r} has fingerprint {info.fingerprint.hex()} (model {info.model!r}), "
                f"the pool has {pool.fingerprint.hex()} (model {pool.model!r}): "
                "other weights, config, dtype, layout or block size"
            )
        if info.format != pool.format:
            raise InvalidError(
                f"instance {name!r} has block format {info.format}, the pool has {pool.format}"
            )

    def add(self, info: InstanceInfo, now: float) -> Registered:
        """Take in a checked instance whose name is free, with an empty load."""
        instance = info.instance
        slots = self._by_slot[info.role]
        if None not in slots:
            slots.append(None)
        slot = slots.index(None)
        load = InstanceLoad(instance.name, instance.epoch, [], 0, 0, 0, 0.0, {})
        registered = slots[slot] = Registered(info, load, now, slot, factor=1.0 / info.num_nodes)
        self._by_name[instance.name] = registered
        self._name_prefill(slot, info.role, instance.name, info.home_node)
        return registered

    def remove(self, instance: Registered) -> None:
        del self._by_name[instance.name]
        self._by_slot[instance.info.role][instance.slot] = None
        self._name_prefill(instance.slot, instance.info.role, "", "")

    def was_replaced(self, name: str, epoch: int) -> bool:
        return epoch in self._replaced.get(name, ())

    def remember_replaced(self, name: str, epoch: int) -> None:
        """A process of `name` with another epoch has taken over: this one must not come back."""
        self._replaced.setdefault(name, deque(maxlen=_NUM_REPLACED)).append(epoch)

    def _name_prefill(self, slot: int, role: Role, name: str, home: str) -> None:
        if role != "prefill":
            return
        if slot == len(self.prefill_names):
            self.prefill_names.append(name)
            self.prefill_homes.append(home)
        self.prefill_names[slot], self.prefill_homes[slot] = name, home
