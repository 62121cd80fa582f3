"""OpenAI's shapes on the wire: error objects, and server-sent events cut into whole events.

Guarantees that whatever goes wrong, a client reads ``{"error": {"message", "type", "param", "code"}}``: as the body of
a response with the right status, or, once a stream has begun, as its last event. A stream that ended in an error never
ends with ``[DONE]``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from typing_extensions import Self

Json = dict[str, Any]

DONE = b"data: [DONE]"
_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    409: "ConflictError",
    413: "RequestEntityTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
_BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_NO_CHOICE = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_MAX_EVENT = 64 * 1024 * 1024


class ApiError(Exception):
    """What a client is answered instead of a completion: a status, and an error object in OpenAI's shape."""

    def __init__(self, status: int, message: str, *, param: str | None = None, kind: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.error: Json = {
            "message": message,
            "type": kind or _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError"),  # noqa: PLR2004
            "param": param,
            "code": status,
        }

    @classmethod
    def of_engine(cls, status: int, error: Json) -> Self:
        """Carry an engine's own error object as it is; only a key that OpenAI's shape needs is added."""
        made = cls(status, str(error.get("message", "")))
        made.error = made.error | error
        return made

    def body(self) -> bytes:
        """The JSON body of an error response."""
        return msgspec.json.encode({"error": self.error})

    def event(self) -> bytes:
        """The last event of a stream that failed."""
        return b"data: " + self.body() + b"\n\n"


def read_json(raw: bytes) -> Any:
    """What JSON says. Raises ValueError for what is none, or nested too deeply to be read."""
    try:
        return msgspec.json.decode(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def engine_error(body: bytes) -> Json | None:
    """The ``error`` object in an engine's answer, or None where it has none in OpenAI's shape."""
    try:
        value = read_json(body)
    except ValueError:
        return None
    error = value.get("error") if isinstance(value, dict) else None
    return error if isinstance(error, dict) else None


def event_error(event: bytes) -> ApiError | None:
    """The error that an engine reports inside a stream, with the status that it names, or None for any other event."""
    # Every chunk passes here, so the JSON is read only where its first key is "error" (vLLM 0.29
    # entrypoints/generate/base/serving.py, create_streaming_error_response).
    if not event.startswith(b'data: {"error"'):
        return None
    error = engine_error(event[len(b"data: ") :])
    if error is None:
        return None
    code = error.get("code")
    return ApiError.of_engine(code if isinstance(code, int) and 400 <= code < 600 else 502, error)  # noqa: PLR2004


def is_answer(event: bytes) -> bool:
    """Whether an event carries anything of the answer: a usage chunk, without a choice, does not."""
    return is_data(event) and _NO_CHOICE.search(event) is None  # in the answer's text, quotes would be escaped


def is_data(event: bytes) -> bool:
    """Whether an event carries data; a comment (keep-alive) says nothing about the request."""
    return event.startswith(b"data:") or b"\ndata:" in event


class EventCutter:
    """Cuts a byte stream into whole events, so that an error event never lands in the middle of another one.

    Holds at most one unfinished event, of a bounded size.
    """

    def __init__(self) -> None:
        self._rest = b""

    @property
    def holds(self) -> bool:
        """Whether the beginning of an event waits for its end."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that ``data`` completes, each without its blank line."""
        start = max(len(self._rest) - 3, 0)  # a blank line may straddle two reads
        data = self._rest + data
        events = []
        begin = 0
        while match := _BLANK_LINE.search(data, start):
            if event := data[begin : match.start()].lstrip(b"\r\n"):
                events.append(event)
            begin = start = match.end()
        self._rest = data[begin:]
        if len(self._rest) > _MAX_EVENT:
            raise ValueError(f"one event is longer than {_MAX_EVENT} bytes")
        return events
