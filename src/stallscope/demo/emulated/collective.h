/* A collective and its execution on a stream: the layer between the NCCL names and the meeting place. */
#ifndef EMULATED_COLLECTIVE_H
#define EMULATED_COLLECTIVE_H

#include "device.h"
#include "meet.h"

#define N_DATATYPES 12 /* ncclInt8 .. ncclFloat8e5m2 */

typedef int ncclResult_t;

enum { ncclSuccess = 0, ncclSystemError = 2, ncclInvalidArgument = 4, ncclInvalidUsage = 5 };

enum kind { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL, GATHER, SCATTER, SEND, RECV };

struct comm {
	unsigned char id[ID_BYTES];
	struct place *place;
	int rank, nranks, device;
	_Atomic int64_t n_rounds; /* run on the device so far */
	_Atomic uint32_t n_pending;
	_Atomic bool is_aborted;
	uint64_t n_splits, n_shrinks, n_grows;
	uint64_t n_calls[RECV + 1]; /* enqueued, by kind */
	void *profiler;
	bool is_profiled;
};

struct part {
	struct comm *comm;
	void *stream;
	enum kind kind;
	const void *send;
	void *recv;
	size_t count;
	int datatype, reduce_op, root; /* root: of SEND and RECV the peer */
	void *event; /* see profiler.h; NULL from the caller */
};

/* All given parts run as one operation per stream, like the calls of an NCCL group. Copies `parts`. */
ncclResult_t collective_enqueue(const struct part *parts, int n_parts);

#endif
