"""Every error this project raises on purpose, as one hierarchy.

    Dsv4Error                     shown to a user as one line, never as a traceback
    ├── ConfigError               a config file or a flag: what was expected, what came, what to do
    ├── CheckpointError           a file on disk: which one, which tensor, what is wrong with it
    ├── CaptureError              a step that cannot become a static graph: operator and source line
    ├── PlatformError             a device, compiler or library that is not there, and what to use instead
    ├── RequestError              a client's mistake: HTTP 400 with the field's name
    │   └── UnknownModelError     HTTP 404
    ├── OverloadedError           the waiting queue is full: HTTP 503 with Retry-After
    └── EngineError               a step failed or a worker died: in-flight requests end with "error"
        └── UnavailableError      workers are lost or hang: HTTP 503 until they are back

Programming mistakes stay `AssertionError`, `TypeError` and friends.
"""


class Dsv4Error(Exception):
    """Base of all expected failures; `str(error)` is one readable line."""


class ConfigError(Dsv4Error, ValueError):
    """A configuration value or flag that cannot be served."""


class CheckpointError(Dsv4Error):
    """A checkpoint that is missing, damaged or of another format."""


class CaptureError(Dsv4Error):
    """A step function that cannot be captured, lowered or compiled."""


class PlatformError(Dsv4Error):
    """Hardware or software the chosen platform needs and does not have."""


class RequestError(Dsv4Error, ValueError):
    """A request that cannot be honoured. `param` names the offending field, `code` is machine readable."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class UnknownModelError(RequestError):
    """The request names a model this server does not serve."""


class OverloadedError(Dsv4Error):
    """The waiting queue is full; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(Dsv4Error):
    """The engine could not finish a step."""


class UnavailableError(EngineError):
    """The engine takes no requests now: its workers are lost, hang, or are being restarted."""
