/* NCCL's profiler plugin, interface version 5: the calls that NCCL makes for collectives on one channel. */
#ifndef EMULATED_PROFILER_H
#define EMULATED_PROFILER_H

#include "collective.h"

/* When the host enqueues a collective: its event, NULL where the plugin needs none. Not for SEND and RECV. */
void *profiler_enqueued(struct comm *comm, enum kind kind, size_t count);
/* When a graph replays a collective that was captured with this mask. NCCL counts it if its group has a handle. */
void *profiler_replayed(struct comm *comm, enum kind kind, size_t count, int mask);
/* The mask now, which a captured collective keeps. */
int profiler_mask(struct comm *comm);
/* When its kernel has ended. Times: of the kernel. */
void profiler_ran(const struct comm *comm, void *event, int64_t start_ns, int64_t end_ns);

#endif
