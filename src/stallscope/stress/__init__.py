"""A load for hubs: rows as agents send them, with a straggler if wanted, and how long the hub takes for them."""
