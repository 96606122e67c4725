// SPDX-License-Identifier: Apache-2.0
/* Another profiler plugin: counts its calls, and checks that the parents of events are its own handles. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef V7 /* phases of kernels, but not their channels: NCCL also reports the channels */
enum { COLL = 2, KERNEL_CH = 64, KERNEL_PHASE = 1 << 15, WANTED = COLL | KERNEL_PHASE };
#else
enum { COLL = 2, KERNEL_CH = 64, KERNEL_PHASE = 1 << 15, WANTED = COLL | KERNEL_CH };
#endif
struct handle { int magic; uint64_t type; };
static int context;
static _Atomic int n_init, n_coll, n_kernels, n_stops, n_states, n_phases, n_wrong; /* NCCL calls from several threads */

static int begin(void **c, int *mask)
{
	*c = &context;
	*mask = WANTED;
	n_init++;
	return 0;
}
static int init_new(void **c, uint64_t id, int *mask, const char *name, int nodes, int ranks, int rank, void *log)
{
	(void)nodes; (void)ranks; (void)log;
	n_wrong += id != 0xabc || !name || rank != 3;
	return begin(c, mask);
}
static int init_v4(void **c, int *mask, const char *name, uint64_t id, int nodes, int ranks, int rank, void *log)
{
	return init_new(c, id, mask, name, nodes, ranks, rank, log);
}
static int start(void *c, void **out, void *event)
{
	struct handle *handle = malloc(sizeof(*handle)), *parent = *(struct handle **)((char *)event + 8);

	handle->magic = 77;
#if defined V3 || defined V4
	handle->type = *(uint8_t *)event;
#else
	handle->type = *(uint64_t *)event;
#endif
	n_wrong += c != &context || (parent && parent->magic != 77) || (handle->type == KERNEL_CH && !parent);
	if (handle->type == KERNEL_PHASE) {
		n_phases++;
		n_wrong += !parent || parent->type != KERNEL_CH;
	}
#ifdef V7 /* the tag is the last field of the description of a collective */
	uint64_t tag;

	memcpy(&tag, (char *)event + 24 + 104, sizeof(tag));
	n_wrong += handle->type == COLL && tag != (uint64_t)n_coll + 1000;
#endif
	n_coll += handle->type == COLL;
	n_kernels += handle->type == KERNEL_CH;
	*out = handle;
	return 0;
}
static int stop(void *h) { n_stops++; n_wrong += ((struct handle *)h)->magic != 77; return 0; }
static int state(void *h, int s, void *a) { (void)s; (void)a; n_states++; n_wrong += ((struct handle *)h)->magic != 77; return 0; }
static int finalize(void *c) { n_wrong += c != &context; return 0; }
static void __attribute__((destructor)) report(void)
{
	fprintf(stderr, "other: init %d coll %d kernels %d stops %d states %d phases %d wrong %d\n", n_init, n_coll, n_kernels, n_stops, n_states, n_phases, n_wrong);
}

struct plugin { const char *name; void *init; int (*start)(void *, void **, void *); int (*stop)(void *); int (*state)(void *, int, void *);
		int (*finalize)(void *); };
#ifdef V3
struct plugin ncclProfiler_v3 = { "other", begin, start, stop, state, finalize };
#endif
#ifdef V4
struct plugin ncclProfiler_v4 = { "other", init_v4, start, stop, state, finalize };
#endif
#ifdef V5
struct plugin ncclProfiler_v5 = { "other", init_new, start, stop, state, finalize };
#endif
#ifdef V6
struct plugin ncclProfiler_v6 = { "other", init_new, start, stop, state, finalize };
#endif
#ifdef V7
struct plugin ncclProfiler_v7 = { "other", init_new, start, stop, state, finalize };
#endif
