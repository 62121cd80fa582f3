"""The errors that kvxfer raises. Each message says who, where, and what to change."""


class KvxferError(Exception):
    """Base of every error that kvxfer raises on purpose."""


class ConfigError(KvxferError):
    """A setting is missing, of the wrong type, out of range, or contradicts another."""


class NativeLibraryError(KvxferError):
    """A native library that NIXL's LIBFABRIC plugin needs is missing or too old; the text says what to install."""


class PlatformError(KvxferError):
    """No platform fits this machine, or a platform cannot answer a question about its memory."""


class LayoutMismatchError(KvxferError):
    """Two ranks lay their caches out in ways that no descriptor list can connect."""


class RailsError(KvxferError):
    """Device memory is on other rails than it should be, and ``rails_policy`` is enforce."""


class TransportError(KvxferError):
    """The NIXL agent or the control channel could not be started, or refused an operation."""


class HandshakeRefusedError(KvxferError):
    """A peer was reached, and the two engines must not exchange KV; the text has both sides' values."""


class ProtocolError(KvxferError):
    """Base of the two protocol errors: who erred is what matters."""


class LocalProtocolError(ProtocolError):
    """Our own process asked a state machine for something its state does not allow: a defect of ours."""


class RemoteProtocolError(ProtocolError):
    """A peer sent something that its state, or the message schema, does not allow."""
