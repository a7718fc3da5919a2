"""Domain errors, and the one table that maps them to gRPC status codes and back."""

from __future__ import annotations

import grpc

DEFAULT_RETRY_AFTER_SECONDS = 1.0


class StoreError(Exception):
    """Base of every error that crosses a process boundary; its class is its status code."""


class InvalidError(StoreError):
    """The caller sent something malformed or out of range."""


class NotFoundError(StoreError):
    """No such key, handle, segment or instance."""


class StaleError(StoreError):
    """A handle or address of an earlier epoch or generation."""


class ExhaustedError(StoreError):
    """No room now (memory, slots, queue): try later or elsewhere."""


class UnavailableError(StoreError):
    """The peer is not there, or not ready."""


class DeadlineError(StoreError):
    """The operation did not end in its time."""


class RefusedError(StoreError):
    """Admission control: the SLO is out of reach; the message may carry a Retry-After in seconds."""

    def __init__(self, message: str, retry_after_seconds: float = DEFAULT_RETRY_AFTER_SECONDS):
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class InternalError(StoreError):
    """A fault of ours; the message names it."""


STATUS = {
    InvalidError: grpc.StatusCode.INVALID_ARGUMENT,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    StaleError: grpc.StatusCode.FAILED_PRECONDITION,
    ExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    RefusedError: grpc.StatusCode.ABORTED,
    InternalError: grpc.StatusCode.INTERNAL,
}
ERRORS = {code: error for error, code in STATUS.items()}
