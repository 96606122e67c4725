"""Jobs without progress: a missing rank, a deadlock, different calls in one round."""
