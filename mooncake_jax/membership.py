"""How a prefill or decode instance stays known to the Conductor: it registers, beats, and registers again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvstore.errors import InternalError, StoreError
from kvstore.rpc import Stub
from mooncake_jax.messages import CONDUCTOR, InstanceInfo, InstanceLoad

_CALL_SECONDS = 2.0
_FIRST_RETRY_SECONDS = 0.1
_LAST_RETRY_SECONDS = 2.0
log = logging.getLogger(__name__)


class Membership:
    """One thread that keeps `info` registered and sends `load()` every `interval_seconds`, until `close()`.

    `registered` is set while the Conductor knows this instance, as far as its last answer tells: a Conductor
    that does not answer may have kept its books. `last_error` is why the last call failed, None after one
    that did not.
    """

    def __init__(
        self,
        conductor_address: str,
        info: InstanceInfo,
        load: Callable[[], InstanceLoad],
        *,
        interval_seconds: float = 1.0,
    ):
        """`load` is called from the thread. Nothing is raised when the Conductor is not there yet."""
        if not interval_seconds > 0.0:
            raise ValueError(f"interval_seconds must be positive, got {interval_seconds}")
        self._info, self._load, self._interval = info, load, interval_seconds
        self.registered = threading.Event()
        self.last_error: StoreError | None = None
        self._retry_seconds = _FIRST_RETRY_SECONDS
        self._closing = threading.Event()
        self._stub = Stub(conductor_address, CONDUCTOR, timeout_seconds=_CALL_SECONDS)
        self._thread = threading.Thread(target=self._run, name=f"membership-{info.instance.name}")
        self._thread.start()

    def close(self) -> None:
        """Stop beating; the Conductor drops the instance after the heartbeats it then misses."""
        self._closing.set()
        self._thread.join()
        self._stub.close()
        self.registered.clear()

    def _run(self) -> None:
        wait_seconds = 0.0
        while not self._closing.wait(wait_seconds):
            wait_seconds = self._turn()

    def _turn(self) -> float:
        """Register or beat once; returns the seconds until the next turn."""
        try:
            if not self.registered.is_set():
                self._stub.register(self._info)
                self.registered.set()
                log.info(
                    "%s: registered with the Conductor at %s", self._info.instance.name, self._stub.address
                )
            elif self._stub.heartbeat(self._load()).known:
                self._answered()
                return self._interval
            else:
                self.registered.clear()
                log.info("%s: the Conductor does not know us any more", self._info.instance.name)
                return _FIRST_RETRY_SECONDS
            self._answered()
            return 0.0
        except StoreError as error:
            return self._failed(error)
        except Exception as error:  # load() is the role's: a fault of it must not end the beats for good
            log.exception("%s: cannot tell its load", self._info.instance.name)
            return self._failed(InternalError(f"load of {self._info.instance.name}: {error!r}"))

    def _answered(self) -> None:
        self.last_error = None
        self._retry_seconds = _FIRST_RETRY_SECONDS

    def _failed(self, error: StoreError) -> float:
        if type(error) is not type(self.last_error):
            log.warning("%s: %s", self._info.instance.name, error)
        self.last_error = error
        wait_seconds = self._retry_seconds
        self._retry_seconds = min(2.0 * wait_seconds, _LAST_RETRY_SECONDS)
        return wait_seconds
