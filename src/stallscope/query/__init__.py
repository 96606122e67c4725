"""Ad hoc queries on node traces: a user's SQL, and several traces as one."""
