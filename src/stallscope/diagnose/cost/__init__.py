"""GPU seconds lost to a delay, with a lower and an upper bound."""
