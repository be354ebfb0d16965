"""Versions of SimpleTuner that were tried, and how."""

from __future__ import annotations

_SERVES = "tried: every hook is set and serves"
KNOWN = {
    **dict.fromkeys(("4.6.0", "4.6.1", "4.7.0", "4.7.1", "4.8.0"), _SERVES),
    **dict.fromkeys(("4.9.0", "4.9.1", "4.9.2", "4.9.3", "4.10.0"), _SERVES),
    "4.10.1": "tried: it trains the same weights with the plug-in as without",
}
