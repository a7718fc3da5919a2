"""The stages of a group's members, as the server's pipeline engine drives them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.transfer import SharedBuffer, TransferEngine
from models.ticks import Tick
from mooncake_jax.engine.contract import EngineLostError, Sampled
from mooncake_jax.engine.group.group import MemberGroup
from mooncake_jax.engine.group.landing import NUM_AREAS, Landing
from mooncake_jax.engine.group.messages import Attach, InsertPrefix, Reset, RunTick
from mooncake_jax.request import Sampling

_START_SECONDS = 2.0  # of one wait for members: whoever asks may want to end


class RemoteStages:
    """`mooncake_jax.engine.stages.Stages` of a group that was ready once. Each epoch has landing memory of its own, so
    that nothing which a member of an earlier one still writes can be taken for KV of this one. Close it in the end."""

    def __init__(self, group: MemberGroup, transfer: TransferEngine):
        self.plan = group.plan
        self._group, self._transfer = group, transfer
        self._landing = Landing(self.plan)
        self._memory: SharedBuffer | None = None
        self._segment_name = ""
        self._epoch = 0
        self._owners: list[int] = []  # the member that has each stage
        self._compiles: dict[int, int] = {}
        self._number = self._num_ticks = 0

    @property
    def compiles(self) -> int:
        return max(self._compiles.values(), default=0)

    @property
    def is_ready(self) -> bool:
        return self._memory is not None and self._group.is_ready(self._epoch)

    def start(self) -> None:
        """Returns when a new epoch is ready. Raises EngineLostError when that takes more than two seconds."""
        ready = self._group.wait_ready(_START_SECONDS)
        epoch = next(iter(ready.values())).epoch
        owners = {stage: index for index, report in ready.items() for stage in report.stages}
        if sorted(owners) != list(range(self.plan.num_stages)):
            raise EngineLostError(f"members have the stages {sorted(owners)} of {self.plan.num_stages}")
        self.close()
        self._owners = [owners[stage] for stage in range(self.plan.num_stages)]
        self._memory = SharedBuffer("landing", self._landing.nbytes)
        self._segment_name = f"landing/{self._transfer.peer.epoch:x}/{epoch}"
        segment = self._transfer.register_local_memory(
            self._memory.array, name=self._segment_name, shm_path=self._memory.path
        )
        self._epoch, self._number, self._num_ticks = epoch, 0, 0
        self._compiles = {index: report.compiles for index, report in ready.items()}
        self._group.send(epoch, Attach(segment))

    def reset(self) -> None:
        self._group.send(self._epoch, Reset())

    def tick(
        self, tick: Tick, tokens: np.ndarray, sample: Sampling | None, prompt: Sequence[int] | np.ndarray
    ) -> _Ran:
        number, area = self._next_number(), self._num_ticks % NUM_AREAS
        self._num_ticks += 1
        order = RunTick(
            number,
            area,
            list(tick),
            np.asarray(tokens, np.int32).tobytes(),
            sample,
            np.asarray(prompt, np.int32).tobytes(),
        )
        self._group.send(self._epoch, order)
        return _Ran(self, number, area)

    def insert(self, stage: int, slot: int, first_page: int, blocks: np.ndarray) -> None:
        """Returns when the member has read `blocks`."""
        number = self._next_number()
        self._landing.prefix_blocks(self._bytes, len(blocks))[:] = blocks
        self._group.send(self._epoch, InsertPrefix(number, stage, slot, first_page, len(blocks)))
        self._wait(number, stage)

    def close(self) -> None:
        """Frees the landing memory. The group is its owner's."""
        if self._memory is not None:
            self._transfer.unregister(self._segment_name, wait_seconds=1.0)
            self._memory.close()
            self._memory = None

    def landed(self, number: int, area: int, stage: int) -> np.ndarray:
        """New blocks of a stage, once they are there."""
        self._wait(number, stage)
        return self._landing.new_blocks(self._bytes, area, stage)

    def sampled(self, number: int) -> Sampled:
        """What the last stage drew."""
        sampled = self._wait(number, self.plan.num_stages - 1)
        if sampled is None:
            raise ValueError("a token is drawn where the tick was asked to")
        return sampled

    @property
    def _bytes(self) -> np.ndarray:
        if self._memory is None:
            raise EngineLostError("the prefill group has not started")
        return self._memory.array

    def _next_number(self) -> int:
        self._number += 1
        self._group.forget(self._number - 2 * NUM_AREAS)
        return self._number

    def _wait(self, number: int, stage: int) -> Sampled | None:
        report = self._group.wait(self._epoch, number, self._owners[stage])
        self._compiles[report.index] = report.compiles
        return report.sampled


class _Ran:
    """`stages.Ran` of a tick that was sent."""

    def __init__(self, stages: RemoteStages, number: int, area: int):
        self._stages, self._number, self._area = stages, number, area

    def blocks(self, stage: int) -> np.ndarray:
        return self._stages.landed(self._number, self._area, stage)

    def sampled(self) -> Sampled:
        return self._stages.sampled(self._number)
