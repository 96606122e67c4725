// SPDX-License-Identifier: Apache-2.0
/*
 * The plugin's symbols ncclProfiler_v3 to _v7, and the chain to another profiler plugin.
 *
 * NCCL loads one profiler plugin and uses the newest version that the plugin exports. STALLSCOPE_NCCL_CHAIN names
 * another plugin: it receives the same calls, as if NCCL had loaded it. A plugin of an older version than NCCL's is
 * called in its own version, from version 4 on.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plugin.h"

#define PUBLIC __attribute__((visibility("default")))

enum { EVENTS_V4 = 0xff, EVENTS_V5 = 0xfff, EVENTS_V6 = 0x7fff, BYTES_V4 = 24 + 80, BYTES_V5 = 24 + 88 };
static const uint64_t parents = EVENT_GROUP | EVENT_COLL | EVENT_P2P | EVENT_PROXY_OP | 0xf00; /* with their children */

static const struct profiler_v3 *chain_v3;
static const struct profiler_v4 *chain_v4;
static const struct profiler_v5 *chain_v5;
static int chain_version; /* of chain_v5 */

/* Find the other plugin, in the newest version that NCCL's version can be converted to. */
static void load_chain(int version)
{
	static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
	static int is_loaded;
	const char *name = getenv("STALLSCOPE_NCCL_CHAIN");
	void *library;

	pthread_mutex_lock(&loading);
	if (!is_loaded && name && *name) {
		library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
		for (int newest = version; library && !chain_v5 && newest >= 5; newest--) {
			char symbol[] = "ncclProfiler_v0";

			symbol[sizeof(symbol) - 2] = (char)('0' + newest);
			chain_v5 = dlsym(library, symbol);
			chain_version = newest;
		}
		if (library && !chain_v5 && version >= 4)
			chain_v4 = dlsym(library, "ncclProfiler_v4");
		if (library && version == 3)
			chain_v3 = dlsym(library, "ncclProfiler_v3");
		if (!chain_v3 && !chain_v4 && !chain_v5)
			fprintf(stderr, "stallscope: cannot chain to the profiler plugin %s: %s\n", name,
				library ? "it has no version that NCCL's version can be converted to" : dlerror());
	}
	is_loaded = 1;
	pthread_mutex_unlock(&loading);
}

/* The types of events that the other plugin knows. */
static uint64_t known_events(void)
{
	if (!chain_v5)
		return chain_v4 || chain_v3 ? EVENTS_V4 : 0;
	return chain_version > 6 ? ~0ull : chain_version > 5 ? EVENTS_V6 : EVENTS_V5;
}

static int is_forwarded(uint64_t type)
{
	int mask = __atomic_load_n(&chained_mask, __ATOMIC_RELAXED);

	if (mask & EVENT_KERNEL_PHASE) /* phases are children of a channel */
		mask |= EVENT_KERNEL_CH;
	return mask && (type & known_events()) && (type & (parents | (uint64_t)mask));
}

static nccl_result stop_any(void *handle)
{
	void *chained = chained_handle(handle);

	if (chained)
		chain_v5 ? chain_v5->stop(chained) : chain_v4 ? chain_v4->stop(chained) : chain_v3->stop(chained);
	stop_event(handle);
	return 0;
}

static nccl_result state_any(void *handle, int state, union state_args *args)
{
	void *chained = chained_handle(handle);

	set_state(handle, state, args);
	if (chained)
		chain_v5   ? chain_v5->state(chained, state, args) :
		chain_v4 ? chain_v4->state(chained, state, args) :
			   chain_v3->state(chained, state, args);
	return 0;
}

static nccl_result finalize_any(void *context)
{
	struct comm *comm = context;

	if (comm && (chain_v3 || chain_v4 || chain_v5))
		chain_v5   ? chain_v5->finalize(comm->chained) :
		chain_v4 ? chain_v4->finalize(comm->chained) :
			   chain_v3->finalize(comm->chained);
	close_comm(comm);
	return 0;
}

static nccl_result init_any(void **context, int *mask, int version, uint64_t hash, const char *name, int n_nodes,
			    int n_ranks, int rank, void *log)
{
	struct comm *comm;

	load_chain(version);
	comm = new_comm(hash, rank);
	*context = comm;
	if (chain_v5)
		chain_v5->init(&comm->chained, hash, &chained_mask, name, n_nodes, n_ranks, rank, log);
	else if (chain_v4)
		chain_v4->init(&comm->chained, &chained_mask, name, hash, n_nodes, n_ranks, rank, log);
	else if (chain_v3)
		chain_v3->init(&comm->chained, &chained_mask);
	open_comm(comm, mask, name, n_nodes, n_ranks);
	return 0;
}

static nccl_result init_v3(void **context, int *mask)
{
	return init_any(context, mask, 3, 0, NULL, 0, 0, 0, NULL);
}

static nccl_result init_v4(void **context, int *mask, const char *name, uint64_t hash, int n_nodes, int n_ranks, int rank,
			   void *log)
{
	return init_any(context, mask, 4, hash, name, n_nodes, n_ranks, rank, log);
}

static nccl_result init_v5(void **context, uint64_t hash, int *mask, const char *name, int n_nodes, int n_ranks, int rank,
			   void *log)
{
	return init_any(context, mask, 5, hash, name, n_nodes, n_ranks, rank, log);
}

static nccl_result init_v6(void **context, uint64_t hash, int *mask, const char *name, int n_nodes, int n_ranks, int rank,
			   void *log)
{
	return init_any(context, mask, 6, hash, name, n_nodes, n_ranks, rank, log);
}

static nccl_result init_v7(void **context, uint64_t hash, int *mask, const char *name, int n_nodes, int n_ranks, int rank,
			   void *log)
{
	return init_any(context, mask, 7, hash, name, n_nodes, n_ranks, rank, log);
}

static void describe_proxy(struct operation *op, const struct proxy_op *proxy)
{
	op->peer = proxy->peer;
	op->n_channels = proxy->channel;
	op->is_send = proxy->is_send;
}

static nccl_result start_v3(void *context, void **handle, struct event_v3 *event)
{
	struct comm *comm = context;
	struct operation op = { .type = event->type, .parent = event->parent, .rank = event->rank, .peer = -1 };
	int is_chained = is_forwarded(op.type);

	if (op.type == EVENT_PROXY_OP && !is_of_this_process(comm, event->parent, event->proxy_op.pid)) {
		*handle = NULL;
		return 0;
	}
	if (op.type == EVENT_COLL) {
		op.comm_hash = event->coll.comm_hash;
		op.seq = event->coll.seq;
		op.func = event->coll.func;
		op.count = event->coll.count;
		op.n_channels = event->coll.n_channels;
	} else if (op.type == EVENT_P2P) {
		op.comm_hash = event->p2p.comm_hash;
		op.func = event->p2p.func;
		op.count = event->p2p.count;
		op.peer = event->p2p.peer;
	} else if (op.type == EVENT_PROXY_OP) {
		describe_proxy(&op, &event->proxy_op);
	}
	*handle = start_event(comm, &op, is_chained);
	if (*handle && is_chained) {
		struct event_v3 copy = *event;
		void *chained = NULL;

		copy.parent = chained_handle(event->parent);
		chain_v3->start(comm->chained, &chained, &copy);
		set_chained(*handle, chained);
	}
	return 0;
}

static void forward(struct comm *comm, void *handle, const struct event_v4 *event, uint64_t type, int version)
{
	struct event_v4 copy;
	void *chained = NULL;

	memcpy(&copy, event, version == 4 ? BYTES_V4 : version < 7 ? BYTES_V5 : sizeof(copy));
	copy.parent = chained_handle(event->parent);
	if (version > 4 && type == EVENT_COLL)
		copy.coll.parent_group = chained_handle(event->coll.parent_group);
	else if (version > 4 && type == EVENT_P2P)
		copy.p2p.parent_group = chained_handle(event->p2p.parent_group);
	if (chain_v5)
		chain_v5->start(comm->chained, &chained, &copy);
	else
		chain_v4->start(comm->chained, &chained, &copy);
	set_chained(handle, chained);
}

/* The members of the newer versions at the places of version 4: a parent in version 4 is the group. */
static void forward_older(struct comm *comm, void *handle, const struct event_v4 *event, uint64_t type)
{
	struct event_v4 copy;
	void *parent = type == EVENT_COLL ? event->coll.parent_group :
		       type == EVENT_P2P  ? event->p2p.parent_group :
					    event->parent;
	void *chained = NULL;

	memcpy(&copy, event, BYTES_V5);
	copy.parent = chained_handle(parent);
	chain_v4->start(comm->chained, &chained, &copy);
	set_chained(handle, chained);
}

static nccl_result start_any(void *context, void **handle, struct event_v4 *event, int version)
{
	uint64_t type = version == 4 ? event->type_v4 : event->type;
	struct operation op = { .type = type, .parent = event->parent, .rank = event->rank, .peer = -1 };
	int is_chained = is_forwarded(type);

	if (type == EVENT_PROXY_OP && !is_of_this_process(context, event->parent, event->proxy_op.pid)) {
		*handle = NULL;
		return 0;
	}
	if (type == EVENT_COLL) {
		op.seq = event->coll.seq;
		op.func = event->coll.func;
		op.count = event->coll.count;
		op.n_channels = event->coll.n_channels;
	} else if (type == EVENT_P2P) {
		op.func = event->p2p.func;
		op.count = event->p2p.count;
		op.peer = event->p2p.peer;
		op.n_channels = event->p2p.n_channels;
	} else if (type == EVENT_KERNEL_CH) {
		op.gpu_ns = event->kernel.gpu_ns;
		op.has_gpu_clock = 1;
	} else if (type == EVENT_PROXY_OP) {
		describe_proxy(&op, &event->proxy_op);
	} else if (type == EVENT_COLL_API && version > 4) {
		op.is_captured = event->coll_api.is_captured;
	} else if (type == EVENT_P2P_API && version > 4) {
		op.is_captured = event->p2p_api.is_captured;
	}
	*handle = start_event(context, &op, is_chained);
	if (*handle && is_chained && (chain_v5 || version == 4))
		forward(context, *handle, event, type, version);
	else if (*handle && is_chained)
		forward_older(context, *handle, event, type);
	return 0;
}

static nccl_result start_v4(void *context, void **handle, struct event_v4 *event)
{
	return start_any(context, handle, event, 4);
}

static nccl_result start_v5(void *context, void **handle, struct event_v4 *event)
{
	return start_any(context, handle, event, 5);
}

static nccl_result start_v7(void *context, void **handle, struct event_v4 *event)
{
	return start_any(context, handle, event, 7);
}

PUBLIC struct profiler_v3 ncclProfiler_v3 = { "stallscope", init_v3, start_v3, stop_any, state_any, finalize_any };
PUBLIC struct profiler_v4 ncclProfiler_v4 = { "stallscope", init_v4, start_v4, stop_any, state_any, finalize_any };
PUBLIC struct profiler_v5 ncclProfiler_v5 = { "stallscope", init_v5, start_v5, stop_any, state_any, finalize_any };
PUBLIC struct profiler_v5 ncclProfiler_v6 = { "stallscope", init_v6, start_v5, stop_any, state_any, finalize_any };
PUBLIC struct profiler_v5 ncclProfiler_v7 = { "stallscope", init_v7, start_v7, stop_any, state_any, finalize_any };
