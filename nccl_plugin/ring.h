/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The layout of the shared memory between the plugin and the agent (src/stallscope/capture/gpu/nccl_ring.py).
 *
 * The memory has no file name: the agent opens the file descriptor of the process (/proc/PID/fd). The plugin writes
 * records and never waits for a reader. The agent writes `want`, `lease_ns` and `n_switches`. A record is complete if
 * its `number` is its position plus one; an older number means that the writer has not finished, a newer one that the
 * record is lost.
 */
#ifndef STALLSCOPE_RING_H
#define STALLSCOPE_RING_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define RING_NAME "stallscope-nccl"
#define RING_MAGIC 0x31676e697263636eull /* "nccring1" */

enum { N_RECORDS = 1 << 15, N_COMMS = 64, N_EVENTS = 1 << 15 };
enum { KIND_COLL = 1, KIND_P2P = 2, KIND_PROXY = 3 };
/* IS_REPLAY: of a CUDA graph, so host_ns is the time when the stream reached the operation, not when the host called. */
enum { HAS_GPU_TIMES = 1, ON_HOST_CLOCK = 2, IS_SEND = 4, IS_PARTIAL = 8, IS_REPLAY = 16 };

struct ring_record {
	_Atomic uint64_t number;
	uint64_t comm_hash;
	uint64_t seq;
	uint64_t host_ns;  /* CLOCK_MONOTONIC when the host enqueued the operation */
	uint64_t start_ns; /* first channel of the kernel, on the GPU's clock; KIND_PROXY: duration of the operation */
	uint64_t stop_ns;  /* last channel; KIND_PROXY: time in which the network held the steps */
	uint64_t noticed_ns; /* CLOCK_MONOTONIC when NCCL's thread noticed the start, microseconds after it */
	uint64_t count;
	int32_t rank, peer;
	uint8_t kind, flags, n_channels, pad;
	char func[20];
};

struct ring_comm {
	_Atomic uint64_t comm_hash;
	int32_t rank, n_ranks, n_nodes, is_open;
	char name[40];
};

struct ring {
	uint64_t magic;
	uint32_t n_records, record_bytes, version, pid;
	_Atomic uint32_t want, active; /* bits of events: asked for by the agent, in effect */
	_Atomic uint64_t lease_ns;     /* CLOCK_MONOTONIC until which `want` holds */
	_Atomic uint64_t head, n_dropped, n_events;
	_Atomic uint32_t n_comms, has_thread; /* has_thread: the plugin follows `want` */
	_Atomic uint32_t n_switches;	      /* the agent counts its changes here, and wakes the plugin (futex) */
	uint32_t reserved;
	char pad[4096 - 80];
	struct ring_comm comms[N_COMMS];
	struct ring_record records[N_RECORDS];
};

_Static_assert(sizeof(struct ring_record) == 96 && sizeof(struct ring_comm) == 64, "layout");
_Static_assert(offsetof(struct ring, comms) == 4096, "layout of the header");

#endif
