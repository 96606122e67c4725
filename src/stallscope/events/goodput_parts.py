"""The parts of GPU time in reports on goodput."""

STRAGGLERS, HANGS, RESTARTS, INPUT, IDLE = LOSSES = ("stragglers", "hangs", "restarts", "input", "idle")
PARTS = ("productive", *LOSSES)
