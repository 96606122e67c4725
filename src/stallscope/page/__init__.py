"""The hub's web page: its endpoints, the memory that answers them, sign-in, and the built assets."""
