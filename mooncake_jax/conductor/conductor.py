"""The Conductor without I/O: registrations, heartbeats, requests, ends and time in; decisions out.

The service around it has the lock, the clock, the sockets and the prefix index; the simulator drives the same
object. Every row of the view is computed anew from the last heartbeat and the bookings whenever one of them
changes, so nothing can drift.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Collection, Mapping, Sequence
from itertools import repeat
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np

from kvstore.errors import InvalidError, StaleError, UnavailableError
from mooncake_jax.conductor import admission, estimate
from mooncake_jax.conductor.accuracy import Accuracy
from mooncake_jax.conductor.bookings import ROLES, Booking, Bookings
from mooncake_jax.conductor.config import ConductorConfig
from mooncake_jax.conductor.decision import Decision, PrefixLengths, RequestFeatures
from mooncake_jax.conductor.decision_log import DecisionLog, DecisionRecord, LoggedLink
from mooncake_jax.conductor.expected import ExpectedBlocks
from mooncake_jax.conductor.explain import explain_record, table
from mooncake_jax.conductor.instances import Instances, Registered
from mooncake_jax.conductor.links import Links
from mooncake_jax.conductor.schedule import schedule, shortest_ttfts
from mooncake_jax.conductor.threshold import CANDIDATES, AutoThreshold
from mooncake_jax.conductor.view import ClusterView, DecodeRow, PrefillRow
from mooncake_jax.messages import InstanceInfo, InstanceLoad, RequestEnd, Role
from mooncake_jax.request import Placement, Request

_FREE_PREFILL = PrefillRow("", False, 0, 1, 0, 0.0, 1.0)
_FREE_DECODE = DecodeRow("", False, 0, 1, 0, 0, 0, 0)
log = logging.getLogger(__name__)
_NONE_ON_SSD: Mapping[str, int] = MappingProxyType({})
_THRESHOLD_SAMPLE = 4  # one request in so many teaches the automatic threshold


class Decided(NamedTuple):
    """A decision with all it was made from, besides the view."""

    features: RequestFeatures
    lengths: PrefixLengths
    draws: tuple[float, float]
    decision: Decision


class Conductor:
    """Not thread-safe. `now` is any clock in seconds that never goes back."""

    def __init__(self, config: ConductorConfig, log: DecisionLog):
        self.config = config
        self.log = log
        self.view = ClusterView()
        self.instances = Instances()
        self.bookings = Bookings()
        self.expected = ExpectedBlocks()
        self.links = Links(config.schedule.cost)
        self.accuracy = Accuracy()
        self.schedule_config = config.schedule  # with the threshold in force
        self._threshold = AutoThreshold() if config.auto_threshold else None
        self._num_sampled = 0
        self._random = random.Random(config.seed)

    def register(self, info: InstanceInfo, now: float) -> None:
        """Take in an instance; one of the same name and another epoch is replaced, with its bookings.

        Raises InvalidError for another fingerprint or block format than the pool's, StaleError for an epoch
        that was replaced before.
        """
        self.instances.check(info)
        before = self.instances.get(info.instance.name)
        if before is not None:
            if before.info == info:
                before.beaten_at = now
                return
            self._drop(before, now)
            if before.info.instance.epoch != info.instance.epoch:
                self.instances.remember_replaced(before.name, before.info.instance.epoch)
        self._refresh(self.instances.add(info, now))

    def heartbeat(self, load: InstanceLoad, now: float) -> bool:
        """Take an instance's load and reconcile its bookings; False: not registered (here).

        Raises StaleError for an epoch that was replaced, InvalidError for a rate that is none.
        """
        instance = self.instances.get(load.name)
        if instance is None:
            return False
        if instance.info.instance.epoch != load.epoch:
            if self.instances.was_replaced(load.name, load.epoch):
                raise StaleError(
                    f"instance {load.name!r} of epoch {load.epoch:x} was replaced by a newer process"
                )
            return False
        if not 0.0 <= load.tokens_per_second < math.inf:
            raise InvalidError(
                f"instance {load.name!r}: tokens_per_second {load.tokens_per_second}, not a rate"
            )
        role = instance.info.role
        for booking in self.bookings.reconcile(load.name, role, set(load.request_ids), now):
            self._close(booking, role, ok=True, now=now)
        instance.load, instance.beaten_at = load, now
        if role == "prefill":
            self._learn_links(load, now)
        else:
            self._learn_step(instance)
        self._refresh(instance)
        return True

    def place(
        self,
        request: Request,
        keys: Sequence[bytes],
        held: Mapping[str, int],
        *,
        on_ssd: Mapping[str, int] = _NONE_ON_SSD,
        continued: int = 0,
        avoid: Collection[str] = (),
        now: float,
    ) -> Placement:
        """Decide, log and book. `held`: leading blocks of `keys` per store node; `on_ssd`: how many of these it has
        on SSD only; `continued`: how many blocks after the longest of these runs a node has that is not in `held`.
        An older booking of the request goes.

        Raises RefusedError (429), UnavailableError (no instance) or InvalidError (longer than any instance
        holds).
        """
        self._roll_back(request.request_id, now)
        self.expected.expire(now)
        features, lengths, draws, decision = self.decide(
            request, keys, held, on_ssd=on_ssd, continued=continued, avoid=avoid, now=now
        )
        threshold = self.schedule_config.balancing_threshold
        record = DecisionRecord(
            request_id=request.request_id,
            now=now,
            version=self.view.version,
            changes=self.view.take_changes(),
            request=features,
            local=lengths.local.tolist(),
            best=lengths.best,
            holder=lengths.holder,
            link=LoggedLink.of(lengths.link),
            own_seconds=None if lengths.own_seconds is None else lengths.own_seconds.tolist(),
            continued=lengths.continued,
            balancing_threshold=None if threshold == math.inf else threshold,
            draws=draws,
            decision=decision,
        )
        self.log.append(record)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", table(explain_record(self.schedule_config, record, self.view)))
        self._learn_threshold(features, lengths, now)
        if decision.outcome != "placed":
            raise admission.refusal(decision, features, self.view, self.config.schedule)
        prefill = self.instances.at("prefill", decision.prefill)
        decode = self.instances.at("decode", decision.decode)
        fetch_from = lengths.holder if decision.fetch_blocks else ""
        expected = keys[held.get(prefill.info.home_node, 0) :]
        reused = max(decision.local_blocks, decision.fetch_blocks)
        if reused == lengths.continued_at:
            reused = min(reused + lengths.continued, features.usable_blocks)
        self._book(request, features, decision, reused, prefill, decode, fetch_from, expected, now)
        return Placement(
            request_id=request.request_id,
            prefill=prefill.info.instance,
            decode=decode.info.instance,
            keys=list(keys),
            local_blocks=decision.local_blocks,
            fetch_blocks=decision.fetch_blocks,
            fetch_from=fetch_from,
            ttft_forecast_seconds=decision.ttft_seconds,
            tbt_forecast_seconds=decision.tbt_seconds,
        )

    def decide(
        self,
        request: Request,
        keys: Sequence[bytes],
        held: Mapping[str, int],
        *,
        on_ssd: Mapping[str, int] = _NONE_ON_SSD,
        continued: int = 0,
        avoid: Collection[str] = (),
        now: float,
    ) -> Decided:
        """What `place` would do at this moment, and from what; only the draws of ties are used up.

        Raises UnavailableError before any instance has registered.
        """
        pool = self.instances.pool
        if pool is None:
            raise UnavailableError("no instance has registered yet; start a prefill and a decode instance")
        features = RequestFeatures(
            num_tokens=len(request.tokens),
            max_tokens=request.max_tokens,
            block_tokens=pool.format.block_tokens,
            block_nbytes=pool.format.nbytes,
            avoid_prefill=self._slots("prefill", avoid),
            avoid_decode=self._slots("decode", avoid),
        )
        lengths = self._prefix_lengths(keys, held, on_ssd, continued, now)
        draws = (self._random.random(), self._random.random())
        decision = schedule(self.view, features, lengths, self.schedule_config, now=now, draws=draws)
        return Decided(features, lengths, draws, decision)

    def end(self, end: RequestEnd, now: float) -> None:
        """Close a phase; a good prefill teaches its instance's factor. Unknown ids are over already."""
        self.log.ended(end, now)
        booking = self.bookings.get(end.request_id)
        if booking is None:
            return
        booking.mentioned_at = now
        prefill = self.instances.get(booking.instances.get("prefill", ""))
        if prefill is not None and end.phase == "prefill" and end.ok:
            self._learn_prefill(prefill, booking, end)
            prefill.served_at = now
        for role in ROLES if end.phase == "all" else (end.phase,):
            self._close(booking, role, ok=end.ok, now=now)

    def tick(self, now: float) -> None:
        """Drop instances that miss their heartbeats and bookings that nobody mentions."""
        deadline = now - self.config.instance_timeout_seconds
        for instance in [instance for instance in self.instances if instance.beaten_at < deadline]:
            self._drop(instance, now)
        for booking in self.bookings.silent_since(now - self.config.booking_seconds):
            for role in ROLES:
                self._close(booking, role, ok=False, now=now)
        self.expected.expire(now)

    @property
    def ready(self) -> bool:
        """A prefill and a decode instance are alive."""
        return bool(self.view.prefill.alive.any() and self.view.decode.alive.any())

    @property
    def books(self) -> dict[str, float]:
        """What is booked, and who is here."""
        return {
            **self.bookings.books,
            "expected_blocks": len(self.expected),
            "prefill_instances": int(self.view.prefill.alive.sum()),
            "decode_instances": int(self.view.decode.alive.sum()),
        }

    @property
    def metrics(self) -> dict[str, float]:
        """How far forecasts were off, and the threshold in force (`kvcache_balancing_threshold`)."""
        threshold = self.schedule_config.balancing_threshold
        return {**self.accuracy.summary(), "kvcache_balancing_threshold": threshold}

    def _prefix_lengths(
        self,
        keys: Sequence[bytes],
        held: Mapping[str, int],
        on_ssd: Mapping[str, int],
        continued: int,
        now: float,
    ) -> PrefixLengths:
        lengths, homes = self.expected.lengthen(keys, held), self.instances.prefill_homes
        local = np.fromiter(map(lengths.get, homes, repeat(0)), np.int64, len(homes))
        best = max(held.values(), default=0)
        if best == 0:
            return PrefixLengths(local, 0, "")
        holders = sorted(node for node, length in held.items() if length == best)
        waits = {node: (on_ssd.get(node, 0), self.bookings.in_flight_nbytes(node, now)) for node in holders}
        least = min(waits.values())
        holder = self._random.choice([node for node in holders if waits[node] == least])
        ssd_nbytes = least[0] * self._block_nbytes
        link = self.links.link(holder, self.instances.prefill_names, least[1], now, ssd_nbytes=ssd_nbytes)
        own_seconds = None
        if on_ssd:
            blocks = np.fromiter(map(on_ssd.get, homes, repeat(0)), np.float64, len(homes))
            own_seconds = blocks * (self._block_nbytes / self.config.schedule.cost.ssd_nbytes_per_second)
        return PrefixLengths(local, best, holder, link, own_seconds, continued)

    @property
    def _block_nbytes(self) -> int:
        pool = self.instances.pool
        return pool.format.nbytes if pool else 0

    def _learn_links(self, load: InstanceLoad, now: float) -> None:
        for fetched in load.fetches:
            forecast = self.links.forecast_seconds(fetched.node, load.name, fetched.nbytes, now)
            self.accuracy.add("transfer", forecast_seconds=forecast, measured_seconds=fetched.seconds)
            self.links.learn(fetched.node, load.name, nbytes=fetched.nbytes, seconds=fetched.seconds, now=now)

    def _learn_step(self, instance: Registered) -> None:
        load = instance.load
        if not (load.used_slots and load.tokens_per_second > 0.0):
            return
        cost = self.config.schedule.cost
        forecast = cost.tbt_seconds(float(load.used_slots), float(load.kv_tokens)) * instance.factor
        measured = load.used_slots / load.tokens_per_second
        self.accuracy.add("tbt", forecast_seconds=forecast, measured_seconds=measured)
        instance.factor = estimate.corrected(
            instance.factor, forecast_seconds=forecast, measured_seconds=measured
        )

    def _learn_prefill(self, instance: Registered, booking: Booking, end: RequestEnd) -> None:
        ttft = booking.queue_seconds + booking.transfer_seconds + booking.prefill_seconds
        self.accuracy.add("ttft", forecast_seconds=ttft, measured_seconds=end.queue_seconds + end.seconds)
        fetched = booking.fetch_nbytes if end.fetched_tokens < 0 else end.fetched_tokens
        if fetched:  # its prefill may have waited for the last bytes
            return
        forecast = booking.prefill_seconds
        if end.cached_tokens >= 0:  # what it would have been, had we known how much is reused
            cost, num_tokens = self.config.schedule.cost, booking.num_tokens
            forecast = instance.factor * cost.prefill_seconds(num_tokens, min(end.cached_tokens, num_tokens))
        self.accuracy.add("prefill", forecast_seconds=forecast, measured_seconds=end.seconds)
        instance.factor = estimate.corrected(
            instance.factor, forecast_seconds=forecast, measured_seconds=end.seconds
        )

    def _learn_threshold(self, features: RequestFeatures, lengths: PrefixLengths, now: float) -> None:
        """Let one request in `_THRESHOLD_SAMPLE` that could fetch teach the automatic threshold."""
        if self._threshold is None or lengths.best == 0 or self.config.schedule.policy != "global":
            return
        self._num_sampled += 1
        if self._num_sampled % _THRESHOLD_SAMPLE:
            return
        config = self.schedule_config
        ttfts = shortest_ttfts(self.view, features, lengths, config, thresholds=CANDIDATES, now=now)
        if ttfts:
            self._threshold.learn(ttfts)
        if self._threshold.value != config.balancing_threshold:
            self.schedule_config = msgspec.structs.replace(config, balancing_threshold=self._threshold.value)

    def _slots(self, role: Role, names: Collection[str]) -> tuple[int, ...]:
        found = (self.instances.get(name) for name in names)
        return tuple(sorted({instance.slot for instance in found if instance and instance.info.role == role}))

    def _book(
        self,
        request: Request,
        features: RequestFeatures,
        decision: Decision,
        reused: int,
        prefill: Registered,
        decode: Registered,
        fetch_from: str,
        expected_keys: Sequence[bytes],
        now: float,
    ) -> None:
        booking = Booking(
            request_id=request.request_id,
            booked_at=now,
            instances={"prefill": prefill.name, "decode": decode.name},
            queue_seconds=decision.queue_seconds,
            prefill_seconds=decision.prefill_seconds,
            transfer_seconds=decision.transfer_seconds,
            fetch_from=fetch_from,
            fetch_nbytes=max(decision.fetch_blocks - decision.local_blocks, 0) * features.block_nbytes,
            computed_tokens=features.num_tokens - reused * features.block_tokens,
            num_tokens=len(request.tokens),
            total_tokens=len(request.tokens) + request.max_tokens,
            home_node=prefill.info.home_node,
            expected_keys=expected_keys,
            mentioned_at=now,
        )
        self.bookings.add(booking)
        self.expected.add(booking.home_node, expected_keys)
        self._refresh(prefill)
        self._refresh(decode)

    def _roll_back(self, request_id: str, now: float) -> None:
        booking = self.bookings.get(request_id)
        if booking is not None:
            for role in ROLES:
                self._close(booking, role, ok=False, now=now)

    def _close(self, booking: Booking, role: Role, *, ok: bool, now: float) -> None:
        name = booking.instances.get(role)
        if name is None:
            return
        if role == "prefill" and ok:
            until = now + self.config.expected_block_seconds
            self.expected.settle(booking.home_node, booking.expected_keys, until)
        elif role == "prefill":
            self.expected.drop(booking.home_node, booking.expected_keys)
        self.bookings.close(booking, role)
        instance = self.instances.get(name)
        if instance is not None:
            self._refresh(instance)

    def _drop(self, instance: Registered, now: float) -> None:
        role, slot = instance.info.role, instance.slot
        for booking in list(self.bookings.at(instance.name)):
            self._close(booking, role, ok=False, now=now)
        self.instances.remove(instance)
        self.links.forget(instance.name)
        self.links.forget(instance.info.home_node)
        if role == "prefill":
            self.view.put_prefill(slot, _FREE_PREFILL)
        else:
            self.view.put_decode(slot, _FREE_DECODE)

    def _refresh(self, instance: Registered) -> None:
        if instance.info.role == "prefill":
            self.view.put_prefill(instance.slot, self._prefill_row(instance))
        else:
            self.view.put_decode(instance.slot, self._decode_row(instance))

    def _prefill_row(self, instance: Registered) -> PrefillRow:
        info, load = instance.info, instance.load
        unseen = self.bookings.unseen_at(instance.name, "prefill")
        reported = self.config.schedule.cost.queue_seconds(
            load.queued_tokens,
            load.tokens_per_second,
            instance.factor,
            (
                (booking.computed_tokens, booking.prefill_seconds)
                for booking in self.bookings.at(instance.name)
                if "prefill" in booking.seen
            ),
        )
        return PrefillRow(
            name=instance.name,
            alive=True,
            max_tokens=info.max_tokens,
            num_slots=info.num_slots,
            num_requests=max(load.used_slots, len(load.request_ids)) + len(unseen),
            busy_until=estimate.busy_until(
                instance.beaten_at,
                reported,
                ((booking.booked_at, booking.prefill_seconds) for booking in unseen),
                instance.served_at,
            ),
            factor=instance.factor,
        )

    def _decode_row(self, instance: Registered) -> DecodeRow:
        info, load = instance.info, instance.load
        unseen = self.bookings.unseen_at(instance.name, "decode")
        booked = list(self.bookings.at(instance.name))
        on_their_way = sum(booking.num_tokens for booking in unseen)
        kv_tokens = max(load.kv_tokens + on_their_way, sum(booking.num_tokens for booking in booked))
        return DecodeRow(
            name=instance.name,
            alive=True,
            max_tokens=info.max_tokens,
            num_slots=info.num_slots,
            num_requests=max(load.used_slots, len(load.request_ids)) + len(unseen),
            kv_tokens=kv_tokens,
            committed_tokens=max(kv_tokens, sum(booking.total_tokens for booking in booked)),
            capacity_tokens=info.kv_capacity_tokens,
            factor=instance.factor,
        )
