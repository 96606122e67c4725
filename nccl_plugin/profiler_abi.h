/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The binary interface of NCCL's profiler plugins, versions 3 to 7: the fields that this plugin reads, at their offsets.
 * Source: NVIDIA/nccl 5067397c, src/include/plugin/profiler/profiler_v3.h to profiler_v6.h; 88980683 (NCCL 2.31),
 * profiler_v7.h.
 */
#ifndef STALLSCOPE_PROFILER_ABI_H
#define STALLSCOPE_PROFILER_ABI_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { EVENT_GROUP = 1 << 0, EVENT_COLL = 1 << 1, EVENT_P2P = 1 << 2, EVENT_PROXY_OP = 1 << 3, EVENT_PROXY_STEP = 1 << 4, EVENT_KERNEL_CH = 1 << 6,
       EVENT_COLL_API = 1 << 9, EVENT_P2P_API = 1 << 10, EVENT_KERNEL_PHASE = 1 << 15 };
enum { STATE_SEND_WAIT = 9, STATE_RECV_WAIT = 10, STATE_RECV_FLUSH = 11, STATE_RECV_GPU = 12, STATE_KERNEL_STOP = 22 };

typedef int nccl_result; /* ncclResult_t; 0 is success */

struct proxy_op {
	pid_t pid;
	uint8_t channel;
	int peer, n_steps, chunk_bytes, is_send;
};
/* The call of a collective; of a transfer: the same without the root, so with other padding. */
struct coll_api {
	const char *func;
	size_t count;
	const char *datatype;
	int root;
	void *stream;
	_Bool is_captured; /* into a CUDA graph */
};
struct p2p_api {
	const char *func;
	size_t count;
	const char *datatype;
	void *stream;
	_Bool is_captured;
};
struct kernel_ch {
	uint8_t channel;
	uint64_t gpu_ns; /* not in version 3 */
};

/* Version 3. The type has one byte in versions 3 and 4; the padding after it is not initialised. */
struct event_v3 {
	uint8_t type;
	void *parent;
	int rank;
	union {
		struct {
			const char *comm_name;
			uint64_t comm_hash, seq;
			const char *func;
			const void *send;
			void *recv;
			size_t count;
			int root;
			const char *datatype;
			uint8_t n_channels, n_warps;
			const char *algorithm, *protocol;
		} coll;
		struct {
			const char *comm_name;
			uint64_t comm_hash;
			const char *func;
			void *buffer;
			const char *datatype;
			size_t count;
			int peer;
		} p2p;
		struct proxy_op proxy_op;
		struct kernel_ch kernel;
	};
};

/* Versions 4 to 7. Version 6 adds members to the union; version 7 appends fields to the members. */
struct event_v4 {
	union {
		uint8_t type_v4;
		uint64_t type;
	};
	void *parent;
	int rank;
	union {
		struct {
			uint64_t seq;
			const char *func;
			const void *send;
			void *recv;
			size_t count;
			int root;
			const char *datatype;
			uint8_t n_channels, n_warps;
			const char *algorithm, *protocol;
			void *parent_group; /* version 5 and later: the parent in version 4 */
		} coll;
		struct {
			const char *func;
			void *buffer;
			const char *datatype;
			size_t count;
			int peer;
			uint8_t n_channels;
			void *parent_group;
		} p2p;
		struct proxy_op proxy_op;
		struct kernel_ch kernel;
		struct coll_api coll_api; /* version 5 and later */
		struct p2p_api p2p_api;
		char space[112]; /* of version 7; 88 in versions 5 and 6, 80 in version 4 */
	};
};

union state_args {
	uint64_t gpu_ns; /* kernelCh.pTimer */
	size_t bytes;
};

struct profiler_v3 {
	const char *name;
	nccl_result (*init)(void **context, int *mask);
	nccl_result (*start)(void *context, void **handle, struct event_v3 *event);
	nccl_result (*stop)(void *handle);
	nccl_result (*state)(void *handle, int state, union state_args *args);
	nccl_result (*finalize)(void *context);
};
struct profiler_v4 {
	const char *name;
	nccl_result (*init)(void **context, int *mask, const char *comm_name, uint64_t comm_hash, int n_nodes, int n_ranks,
			    int rank, void *log);
	nccl_result (*start)(void *context, void **handle, struct event_v4 *event);
	nccl_result (*stop)(void *handle);
	nccl_result (*state)(void *handle, int state, union state_args *args);
	nccl_result (*finalize)(void *context);
};
struct profiler_v5 { /* and versions 6 and 7 */
	const char *name;
	nccl_result (*init)(void **context, uint64_t comm_hash, int *mask, const char *comm_name, int n_nodes, int n_ranks,
			    int rank, void *log);
	nccl_result (*start)(void *context, void **handle, struct event_v4 *event);
	nccl_result (*stop)(void *handle);
	nccl_result (*state)(void *handle, int state, union state_args *args);
	nccl_result (*finalize)(void *context);
};

_Static_assert(offsetof(struct event_v4, coll) == 24 && offsetof(struct event_v3, coll) == 24, "offset of the union");
_Static_assert(sizeof(struct event_v4) == 24 + 112 && sizeof(struct event_v3) == 24 + 96, "sizes of the descriptions");
_Static_assert(offsetof(struct event_v4, coll.parent_group) == 24 + 80, "offset of parentGroup");

#endif
