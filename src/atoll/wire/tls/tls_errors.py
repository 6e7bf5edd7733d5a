"""Why two processes do not trust each other, in words that say what to do."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime

from atoll.errors import AccessError, ConnectError, HandshakeCutError

_NEW_JOIN = "take the cluster's present join token (`atoll up --join-file` writes it)"
_NO_TLS = (
    "what listens there speaks no TLS. If the cluster was started with --insecure, use --insecure (or "
    "ATOLL_INSECURE=1) here, too; else the address is another program's"
)

# What OpenSSL does not send where what has come is no TLS: an alert, by which a peer of Atoll knows that this is.
ALERT = b"\x15\x03\x03\x00\x02\x02\x46"

# By OpenSSL's verify codes: of the peer's certificate, found here.
_HAS_EXPIRED = 10
_NOT_YET_VALID = 9
_UNKNOWN_AUTHORITY = (2, 18, 19, 20, 21, 7, 30)
_OTHER_NAME = 62
# OpenSSL's reasons if what has arrived is no TLS.
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")

# By the names of alerts: of this process's certificate, found by the peer.
_ALERTS = {
    "EXPIRED": "it says that this process's certificate has expired: {clock}. It could not be renewed, see its log; "
    "else one of the two clocks is wrong",
    "UNKNOWN_CA": f"it does not know the authority of this process's certificate: {_NEW_JOIN}",
    "DECRYPT_ERROR": f"it does not know the authority of this process's certificate: {_NEW_JOIN}",
    "CERTIFICATE_REQUIRED": "it asks for a certificate, and this process has none: " + _NEW_JOIN,
    "BAD_CERTIFICATE": "it takes this process's certificate for a bad one; where the two clocks differ, set them: "
    "{clock}",
    "PROTOCOL_VERSION": "it speaks another version of TLS than 1.3",
    "HANDSHAKE_FAILURE": "the two sides have no cipher in common",
}


def explained(error: BaseException, who: str, shaking_hands: bool = True) -> ConnectError:
    """The error of a connection to `who`, such as "the controller at tls://10.0.0.1:7000"."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return AccessError(f"{who} is not trusted: {_of_verification(error, who)}")
    reason = getattr(error, "reason", None) or ""
    if isinstance(error, ssl.SSLError):
        for alert, text in _ALERTS.items():
            if "ALERT" in reason and alert in reason:
                return AccessError(f"{who} refuses the connection: {text.format(clock=_clock())}")
    if not shaking_hands:
        return ConnectError(f"the TLS connection to {who} has failed: {reason or error}")
    if isinstance(error, TimeoutError):
        return ConnectError(f"{who} did not finish the TLS handshake in time: it is overloaded, or {_NO_TLS}")
    if isinstance(error, ssl.SSLError) and reason not in ("UNEXPECTED_EOF_WHILE_READING", ""):
        if reason in _NOT_TLS:
            return AccessError(f"{who} cannot be spoken to by TLS: {_NO_TLS}")
        return AccessError(f"the TLS handshake with {who} has failed: {reason}")
    return HandshakeCutError(f"{who} ended the TLS handshake: it is ending, or {_NO_TLS}")


def not_admitted(error: BaseException, who: str) -> ConnectError:
    """Return the error of a handshake with `who`, who has connected to this process: for its log."""
    reason = getattr(error, "reason", None) or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return AccessError(f"{who} is not trusted: {error.verify_message}")
    if reason in _NOT_TLS:
        return AccessError(f"{who} speaks no TLS: it has --insecure (ATOLL_INSECURE), or is no process of Atoll")
    if isinstance(error, TimeoutError):
        return ConnectError(f"{who} did not finish the TLS handshake in time")
    if isinstance(error, ssl.SSLError) and reason not in ("UNEXPECTED_EOF_WHILE_READING", ""):
        if "ALERT" in reason:
            return AccessError(f"{who} does not trust this process: {reason}")
        return AccessError(f"the TLS handshake with {who} has failed: {reason}")
    return HandshakeCutError(f"{who} ended the TLS handshake")


def _of_verification(error: ssl.SSLCertVerificationError, who: str) -> str:
    code = error.verify_code
    if code == _HAS_EXPIRED:
        return (
            f"its certificate has expired by this machine's clock ({_clock()}). Set the clock where it is ahead "
            "(certificates are renewed well before their end); else restart what listens there"
        )
    if code == _NOT_YET_VALID:
        return f"its certificate is of the future by this machine's clock ({_clock()}), which is behind: set the clock"
    if code in _UNKNOWN_AUTHORITY:
        return (
            "its certificate is not of the authority of the join token. The cluster was started anew since: "
            f"{_NEW_JOIN}; or somebody else answers in its place"
        )
    if code == _OTHER_NAME:
        return f"its certificate is of another role ({error.verify_message}). Is the address that of another process?"
    return error.verify_message


def _clock() -> str:
    return f"it is {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC here"
