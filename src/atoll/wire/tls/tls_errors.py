"""Error messages for TLS connections that fail, with the reason and what to do."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime

from atoll.errors import AccessError, ConnectError, HandshakeCutError
from atoll.wire.address import Address

_NEW_JOIN = "use the cluster's current join token (`atoll up --join-file` writes it)"
_NO_TLS = (
    "the process there does not use TLS. If the cluster was started with --insecure, also use --insecure (or "
    "ATOLL_INSECURE=1) here; otherwise another program uses the address"
)

# OpenSSL sends no alert if the peer does not use TLS. This alert tells a peer of Atoll that this side does.
ALERT = b"\x15\x03\x03\x00\x02\x02\x46"

# OpenSSL's codes for the verification of the peer's certificate.
_HAS_EXPIRED = 10
_NOT_YET_VALID = 9
_UNKNOWN_AUTHORITY = (2, 18, 19, 20, 21, 7, 30)
_OTHER_NAME = 62
# OpenSSL's reasons if the received bytes are not TLS.
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")

# Texts by the names of alerts, with which a peer refuses this process's certificate.
_ALERTS = {
    "EXPIRED": "this process's certificate has expired ({clock}). If a clock has just been set, it is renewed within a "
    "minute. If its log shows that the renewal failed, fix that; otherwise set the clock that is wrong",
    "UNKNOWN_CA": f"it does not know the CA of this process's certificate; {_NEW_JOIN}",
    "DECRYPT_ERROR": f"it does not know the CA of this process's certificate; {_NEW_JOIN}",
    "CERTIFICATE_REQUIRED": "it requires a certificate, and this process has none; " + _NEW_JOIN,
    "BAD_CERTIFICATE": "it considers this process's certificate invalid. If the clocks of the two machines differ, set "
    "them ({clock})",
    "PROTOCOL_VERSION": "it does not support TLS 1.3",
    "HANDSHAKE_FAILURE": "the two sides have no cipher in common",
}


def explained(error: BaseException, target: str, shaking_hands: bool = True) -> ConnectError:
    """Return the error of a connection to `target`, such as "the controller at tls://10.0.0.1:7000"."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return AccessError(f"{target} is not trusted: {_verification_text(error)}")
    reason = getattr(error, "reason", None) or ""
    if isinstance(error, ssl.SSLError):
        for alert, text in _ALERTS.items():
            if "ALERT" in reason and alert in reason:
                return AccessError(f"{target} refuses the connection: {text.format(clock=_clock())}")
    if not shaking_hands:
        return ConnectError(f"the TLS connection to {target} failed: {reason or error}")
    if isinstance(error, TimeoutError):
        return ConnectError(f"{target} did not finish the TLS handshake in time: it is overloaded, or {_NO_TLS}")
    if isinstance(error, ssl.SSLError) and reason not in ("UNEXPECTED_EOF_WHILE_READING", ""):
        if reason in _NOT_TLS:
            return AccessError(f"cannot connect to {target} with TLS: {_NO_TLS}")
        return AccessError(f"the TLS handshake with {target} failed: {reason}")
    return HandshakeCutError(f"{target} ended the TLS handshake: it is shutting down, or {_NO_TLS}")


def not_admitted(error: BaseException, peer: str) -> ConnectError:
    """Return the error, for the log, of a handshake with `peer`, which connected to this process."""
    reason = getattr(error, "reason", None) or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return AccessError(f"{peer} is not trusted: {error.verify_message}")
    if reason in _NOT_TLS:
        return AccessError(
            f"{peer} does not use TLS: it was started with --insecure (ATOLL_INSECURE), or it is not a process of Atoll"
        )
    if isinstance(error, TimeoutError):
        return ConnectError(f"{peer} did not finish the TLS handshake in time")
    if isinstance(error, ssl.SSLError) and reason not in ("UNEXPECTED_EOF_WHILE_READING", ""):
        if "ALERT" in reason:
            return AccessError(f"{peer} does not trust this process: {reason}")
        return AccessError(f"the TLS handshake with {peer} failed: {reason}")
    return HandshakeCutError(f"{peer} ended the TLS handshake")


def no_identity(address: Address, what: str, for_hosts: bool = False) -> AccessError:
    """Return the error for dialing `address`, where `what` listens with TLS, without a join token."""
    start = f"{what} at {address.host_and_port} uses TLS, for which"
    if for_hosts:
        return AccessError(
            f"{start} this host needs the cluster's join token for hosts: pass --join FILE or set ATOLL_JOIN=FILE with "
            "the file from `atoll up --host-join-file FILE`"
        )
    return AccessError(
        f"{start} this process needs the cluster's join token: set ATOLL_JOIN to the token or to the file from "
        "`atoll up --join-file FILE`"
    )


def _verification_text(error: ssl.SSLCertVerificationError) -> str:
    code = error.verify_code
    if code == _HAS_EXPIRED:
        return (
            f"its certificate has expired according to this machine's clock ({_clock()}). If a clock has "
            "just been set, try again in a minute, when the process there has renewed it. If the error stays, set the "
            "clock that is wrong; if both clocks are right, restart the process there"
        )
    if code == _NOT_YET_VALID:
        return f"its certificate is not yet valid ({_clock()}). This machine's clock is behind: set the clock"
    if code in _UNKNOWN_AUTHORITY:
        return (
            "its certificate is not from the CA of the join token. Either the cluster has been restarted "
            f"({_NEW_JOIN}; a standby needs a copy of its --authority file), or another process answers at its address"
        )
    if code == _OTHER_NAME:
        return f"its certificate is for another role ({error.verify_message}). Check the address"
    return error.verify_message


def _clock() -> str:
    return f"it is {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC here"
