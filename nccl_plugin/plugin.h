/* SPDX-License-Identifier: Apache-2.0 */
#ifndef STALLSCOPE_PLUGIN_H
#define STALLSCOPE_PLUGIN_H

#include "profiler_abi.h"

/* A communicator of one rank. chained: the context of the other plugin. */
struct comm {
	uint64_t hash;
	int rank;
	void *chained;
};

/* An operation as any version describes it. */
struct operation {
	uint64_t type, seq, comm_hash, count, gpu_ns;
	const char *func;
	void *parent;
	int rank, peer, n_channels, is_send, has_gpu_clock, is_captured;
};

struct comm *new_comm(uint64_t hash, int rank);
void open_comm(struct comm *comm, int *mask, const char *name, int n_nodes, int n_ranks);
void close_comm(struct comm *comm);
int is_of_this_process(const struct comm *comm, const void *parent, pid_t pid);
/* An event, or NULL if neither the agent nor the other plugin needs it. */
void *start_event(struct comm *comm, const struct operation *op, int is_chained);
void set_chained(void *handle, void *chained);
void stop_event(void *handle);
void set_state(void *handle, int state, const union state_args *args);
void *chained_handle(void *handle);

/* The mask that the other plugin has set. */
extern int chained_mask;

#endif
