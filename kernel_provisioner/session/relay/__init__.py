"""The relay between clients and the guest's kernel: a ZMTP-aware splice over Unix sockets.

It trusts clients as far as the session's private directory goes, and the guest not at all. The
parts: ``zmtp`` (wire format), ``inspect`` (what is read), ``ledger`` (what is remembered),
``meter`` (what is counted), ``traffic`` (what a guest may send), ``inject`` (what is said in its
place), ``splice`` (bytes), ``service`` (the relay itself).
"""

from kernel_provisioner.session.relay.inspect import (
    Forward,
    RelayBounds,
    RelayMonitor,
    Request,
    Verdict,
)
from kernel_provisioner.session.relay.service import CHANNELS, Relay
from kernel_provisioner.session.relay.zmtp import FrameParser, ParserBounds, ZmtpError
from kernel_provisioner.session.watchdog import Refuse

__all__ = [
    "CHANNELS",
    "Forward",
    "FrameParser",
    "ParserBounds",
    "Refuse",
    "Relay",
    "RelayBounds",
    "RelayMonitor",
    "Request",
    "Verdict",
    "ZmtpError",
]
