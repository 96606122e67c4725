"""One file for each kind of receiver; each has a function `send` that delivers one change or raises DeliveryFailed."""
