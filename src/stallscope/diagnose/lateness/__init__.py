"""Which late steps count: recurrence, period, imbalance, pauses, a slowdown of the whole job."""
