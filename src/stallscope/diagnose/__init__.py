"""From events to verdicts; pure functions on arrays, in this order:

clocks -> programs -> rounds -> lateness -> blame -> causes -> cost -> verdict, with hang and device beside blame.
engine plugs them together; text says a verdict in words. Nothing turns text back into data.
"""
