"""What placed requests will take from the instances they go to, until heartbeats and ends take over.

A booking has a phase per role. A phase is *unseen* until a heartbeat of its instance lists the request; from
then on the instance's own load includes it. It is over when its end is reported, when a later heartbeat no
longer lists it, when its instance is gone, or when nobody has mentioned it for long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from mooncake_jax.messages import Role

ROLES: tuple[Role, Role] = ("prefill", "decode")


@dataclass(slots=True, eq=False)
class Booking:
    """One placed request. Times are clock seconds."""

    request_id: str
    booked_at: float
    instances: dict[Role, str]  # of the phases that are not over
    queue_seconds: float  # forecasts; prefill is what it adds to the queue
    prefill_seconds: float
    transfer_seconds: float
    fetch_from: str  # the node whose blocks its prefill waits for; "": it fetches nothing
    fetch_nbytes: int
    computed_tokens: int  # of the prompt, those not reused
    num_tokens: int  # of the prompt
    total_tokens: int  # prompt and max_tokens
    home_node: str
    expected_keys: Sequence[bytes]
    mentioned_at: float
    seen: set[Role] = field(default_factory=set)

    def in_flight_nbytes(self, now: float) -> float:
        """What is still to leave `fetch_from`, if that goes as forecast."""
        if self.transfer_seconds <= 0.0:
            return 0.0
        return self.fetch_nbytes * max(0.0, 1.0 - (now - self.booked_at) / self.transfer_seconds)


class Bookings:
    """All bookings, by request and by the instance of each phase that is not over."""

    def __init__(self) -> None:
        self._by_request: dict[str, Booking] = {}
        self._by_instance: dict[str, dict[str, Booking]] = {}
        self._fetching: dict[str, dict[str, Booking]] = {}  # by sending node, while in prefill

    def __len__(self) -> int:
        return len(self._by_request)

    def get(self, request_id: str) -> Booking | None:
        return self._by_request.get(request_id)

    def add(self, booking: Booking) -> None:
        """Book both phases. The request must have no booking (see `close`)."""
        self._by_request[booking.request_id] = booking
        for instance in booking.instances.values():
            self._by_instance.setdefault(instance, {})[booking.request_id] = booking
        if booking.fetch_from:
            self._fetching.setdefault(booking.fetch_from, {})[booking.request_id] = booking

    def close(self, booking: Booking, role: Role) -> None:
        """The phase is over; with its last phase the booking is gone. Closing twice is no error."""
        instance = booking.instances.pop(role, None)
        if instance is None:
            return
        here = self._by_instance[instance]
        del here[booking.request_id]
        if not here:
            del self._by_instance[instance]
        if role == "prefill" and booking.fetch_from:
            self._fetching[booking.fetch_from].pop(booking.request_id)
            if not self._fetching[booking.fetch_from]:
                del self._fetching[booking.fetch_from]
        if not booking.instances:
            del self._by_request[booking.request_id]

    def at(self, instance: str) -> Iterator[Booking]:
        """Bookings with a phase at `instance`, in the order they were made."""
        return iter(self._by_instance.get(instance, {}).values())

    def in_flight_nbytes(self, node: str, now: float) -> float:
        """What `node` still has to send to prefill instances, by forecast."""
        return sum(booking.in_flight_nbytes(now) for booking in self._fetching.get(node, {}).values())

    def unseen_at(self, instance: str, role: Role) -> list[Booking]:
        """Of these, the ones its heartbeats have not listed yet."""
        return [booking for booking in self.at(instance) if role not in booking.seen]

    def reconcile(self, instance: str, role: Role, listed: Collection[str], now: float) -> list[Booking]:
        """Take a heartbeat's request ids; returns the bookings listed before and now no more."""
        over = []
        for booking in self.at(instance):
            if booking.request_id in listed:
                booking.seen.add(role)
                booking.mentioned_at = now
            elif role in booking.seen:
                over.append(booking)
        return over

    def silent_since(self, deadline: float) -> list[Booking]:
        """Bookings that nobody has mentioned after `deadline`."""
        return [booking for booking in self._by_request.values() if booking.mentioned_at < deadline]

    @property
    def books(self) -> dict[str, float]:
        """What is open, for `status`: all 0 when idle."""
        bookings = self._by_request.values()
        return {
            "bookings": len(self._by_request),
            "prefill_bookings": sum("prefill" in booking.instances for booking in bookings),
            "decode_bookings": sum("decode" in booking.instances for booking in bookings),
        }
