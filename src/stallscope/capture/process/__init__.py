"""Facts about traced processes: identity, containers, sockets, annotations, communicators."""
