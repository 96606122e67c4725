/* The collected calls of a thread's open group: see group.h. */
#include <stdlib.h>

#include "group.h"

static _Thread_local int depth;
static _Thread_local struct part *parts;
static _Thread_local int n_parts;
static _Thread_local struct comm *comms[MAX_RANKS];
static _Thread_local int n_comms;

void group_begin(void)
{
	depth++;
}

bool group_is_open(void)
{
	return depth > 0;
}

ncclResult_t group_await_joined(struct comm *comm)
{
	if (!depth) {
		place_wait_all_joined(comm->place);
		return ncclSuccess;
	}
	if (n_comms == MAX_RANKS)
		return ncclInvalidUsage;
	comms[n_comms++] = comm;
	return ncclSuccess;
}

ncclResult_t group_submit(struct part part)
{
	if (!part.comm || part.datatype < 0 || part.datatype >= N_DATATYPES || part.root < 0 ||
	    part.root >= part.comm->nranks)
		return ncclInvalidArgument;
	if (!depth)
		return collective_enqueue(&part, 1);
	if (!(n_parts & (n_parts + 1))) {
		parts = realloc(parts, (2 * n_parts + 2) * sizeof(part));
		if (!parts)
			abort();
	}
	parts[n_parts++] = part;
	return ncclSuccess;
}

void group_forget(void)
{
	depth--;
	free(parts);
	parts = NULL;
	n_parts = n_comms = 0;
}

ncclResult_t group_end(void)
{
	ncclResult_t result;

	if (depth > 1) {
		depth--;
		return ncclSuccess;
	}
	for (int i = 0; i < n_comms; i++)
		place_wait_all_joined(comms[i]->place);
	result = collective_enqueue(parts, n_parts);
	group_forget();
	return result;
}
