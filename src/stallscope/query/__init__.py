"""Questions to node traces that the house does not know beforehand: a user's SQL, and several traces as one."""
