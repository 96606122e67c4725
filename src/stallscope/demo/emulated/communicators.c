/*
 * libnccl.so.2, emulated: communicators, with the names and calling conventions of NCCL 2.28.
 *
 * The creation of a communicator blocks until all its ranks have joined; inside a group, until the group's end.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "clock.h"
#include "collective.h"
#include "device.h"
#include "group.h"
#include "meet.h"
#include "nccl_names.h"

typedef struct {
	unsigned char internal[ID_BYTES];
} ncclUniqueId;

API ncclResult_t ncclGetVersion(int *version)
{
	if (!version)
		return ncclInvalidArgument;
	*version = 22809;
	return ncclSuccess;
}
NCCL(ncclGetVersion);

API const char *ncclGetErrorString(ncclResult_t result)
{
	switch (result) {
	case ncclSuccess:
		return "no error";
	case ncclSystemError:
		return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
	case ncclInvalidArgument:
		return "invalid argument (run with NCCL_DEBUG=WARN for details)";
	case ncclInvalidUsage:
		return "invalid usage (run with NCCL_DEBUG=WARN for details)";
	default:
		return "unknown result code";
	}
}
NCCL(ncclGetErrorString);

API const char *ncclGetLastError(struct comm *comm)
{
	(void)comm;
	return "";
}
NCCL(ncclGetLastError);

API ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId)
{
	if (!uniqueId)
		return ncclInvalidArgument;
	return getrandom(uniqueId, sizeof(*uniqueId), 0) == sizeof(*uniqueId) ? ncclSuccess : ncclSystemError;
}
NCCL(ncclGetUniqueId);

/* Joins, and waits for the others unless a group is open: then the group's end waits. */
static ncclResult_t join(struct comm **newcomm, const unsigned char id[ID_BYTES], int nranks, int rank)
{
	struct comm *comm;

	if (!newcomm || nranks < 1 || nranks > MAX_RANKS || rank < 0 || rank >= nranks)
		return ncclInvalidArgument;
	comm = calloc(1, sizeof(*comm));
	if (!comm)
		return ncclSystemError;
	*comm = (struct comm){ .rank = rank, .nranks = nranks, .device = emulated_device() };
	memcpy(comm->id, id, ID_BYTES);
	comm->place = place_open(id, nranks);
	if (!comm->place) {
		free(comm);
		return ncclSystemError;
	}
	*newcomm = comm;
	return group_await_joined(comm);
}

API ncclResult_t ncclCommInitRank(struct comm **comm, int nranks, ncclUniqueId commId, int rank)
{
	return join(comm, commId.internal, nranks, rank);
}
NCCL(ncclCommInitRank);

API ncclResult_t ncclCommInitRankConfig(struct comm **comm, int nranks, ncclUniqueId commId, int rank, void *config)
{
	(void)config;
	return join(comm, commId.internal, nranks, rank);
}
NCCL(ncclCommInitRankConfig);

/* Several ids make one communicator: the first id counts. */
API ncclResult_t ncclCommInitRankScalable(struct comm **newcomm, int nranks, int myrank, int nId, ncclUniqueId *commIds,
					  void *config)
{
	(void)config;
	if (nId < 1 || nId > nranks || !commIds)
		return ncclInvalidArgument;
	return join(newcomm, commIds[0].internal, nranks, myrank);
}
NCCL(ncclCommInitRankScalable);

API ncclResult_t ncclCommInitAll(struct comm **comms, int ndev, const int *devlist)
{
	int before = emulated_device();
	ncclResult_t result = ncclSuccess;
	ncclUniqueId id;

	if (!comms || ndev < 1 || getrandom(&id, sizeof(id), 0) != sizeof(id))
		return ncclInvalidArgument;
	group_begin();
	for (int i = 0; i < ndev && !result; i++) {
		emulated_set_device(devlist ? devlist[i] : i);
		result = join(&comms[i], id.internal, ndev, i);
	}
	emulated_set_device(before);
	if (result)
		group_forget();
	return result ? result : group_end();
}
NCCL(ncclCommInitAll);

/* The id of a communicator made from a parent: all its ranks derive the same id. */
static void derive_id(const struct comm *parent, uint64_t n, int64_t what, unsigned char id[ID_BYTES])
{
	uint64_t hash = hash_bytes(parent->id, ID_BYTES, 1);

	hash = hash_bytes(&n, sizeof(n), hash);
	hash = hash_bytes(&what, sizeof(what), hash);
	for (int i = 0; i < ID_BYTES / 8; i++) {
		hash = hash_bytes(&i, sizeof(i), hash);
		memcpy(id + 8 * i, &hash, 8);
	}
}

API ncclResult_t ncclCommSplit(struct comm *comm, int color, int key, struct comm **newcomm, void *config)
{
	int64_t mine[2] = { color, key }, all[MAX_RANKS][2];
	unsigned char id[ID_BYTES];
	int nranks = 0, rank = 0;

	(void)config;
	if (!comm || !newcomm)
		return ncclInvalidArgument;
	exchange(comm->place, comm->rank, comm->n_splits, mine, all);
	derive_id(comm, comm->n_splits++, color, id);
	*newcomm = NULL;
	if (color < 0)
		return ncclSuccess;
	for (int i = 0; i < comm->nranks; i++) {
		if (all[i][0] != color)
			continue;
		nranks++;
		rank += all[i][1] < key || (all[i][1] == key && i < comm->rank);
	}
	return join(newcomm, id, nranks, rank);
}
NCCL(ncclCommSplit);

API ncclResult_t ncclCommShrink(struct comm *comm, int *excludeRanksList, int excludeRanksCount, struct comm **newcomm,
				void *config, int shrinkFlags)
{
	unsigned char id[ID_BYTES];
	uint64_t excluded = 0;
	int rank = 0;

	(void)config;
	(void)shrinkFlags;
	if (!comm || !newcomm || !excludeRanksList || excludeRanksCount < 1 || excludeRanksCount >= comm->nranks)
		return ncclInvalidArgument;
	for (int i = 0; i < excludeRanksCount; i++)
		excluded |= 1ULL << excludeRanksList[i];
	if (excluded & 1ULL << comm->rank)
		return ncclInvalidUsage;
	for (int i = 0; i < comm->rank; i++)
		rank += !(excluded & 1ULL << i);
	derive_id(comm, 1ULL << 32 | comm->n_shrinks++, (int64_t)excluded, id);
	return join(newcomm, id, comm->nranks - __builtin_popcountll(excluded), rank);
}
NCCL(ncclCommShrink);

API ncclResult_t ncclCommGetUniqueId(struct comm *comm, ncclUniqueId *uniqueId)
{
	return comm ? ncclGetUniqueId(uniqueId) : ncclInvalidArgument;
}
NCCL(ncclCommGetUniqueId);

/* Old ranks keep their number and pass -1; one of them has the id. New ranks have no comm. */
API ncclResult_t ncclCommGrow(struct comm *comm, int nRanks, const ncclUniqueId *uniqueId, int rank,
			      struct comm **newcomm, void *config)
{
	ncclUniqueId id;

	(void)config;
	if (!newcomm || (!comm && !uniqueId) || (comm && nRanks <= comm->nranks))
		return ncclInvalidArgument;
	if (!comm)
		return join(newcomm, uniqueId->internal, nRanks, rank);
	if (uniqueId) {
		id = *uniqueId;
		id_give(comm->place, comm->n_grows, id.internal);
	} else {
		id_take(comm->place, comm->n_grows, id.internal);
	}
	comm->n_grows++;
	return join(newcomm, id.internal, nRanks, comm->rank);
}
NCCL(ncclCommGrow);

static void wait_until_unused(struct comm *comm)
{
	while (comm->n_pending)
		sleep_until(now_ns() + 200000);
}

API ncclResult_t ncclCommFinalize(struct comm *comm)
{
	if (!comm)
		return ncclInvalidArgument;
	wait_until_unused(comm);
	return ncclSuccess;
}
NCCL(ncclCommFinalize);

static void leave(struct comm *comm)
{
	wait_until_unused(comm);
	place_close(comm->place);
	free(comm);
}

API ncclResult_t ncclCommDestroy(struct comm *comm)
{
	if (comm)
		leave(comm);
	return ncclSuccess;
}
NCCL(ncclCommDestroy);

API ncclResult_t ncclCommAbort(struct comm *comm)
{
	if (!comm)
		return ncclSuccess;
	comm->is_aborted = true;
	leave(comm);
	return ncclSuccess;
}
NCCL(ncclCommAbort);

API ncclResult_t ncclCommGetAsyncError(struct comm *comm, ncclResult_t *asyncError)
{
	if (!comm || !asyncError)
		return ncclInvalidArgument;
	*asyncError = ncclSuccess;
	return ncclSuccess;
}
NCCL(ncclCommGetAsyncError);

API ncclResult_t ncclCommCount(const struct comm *comm, int *count)
{
	if (!comm || !count)
		return ncclInvalidArgument;
	*count = comm->nranks;
	return ncclSuccess;
}
NCCL(ncclCommCount);

API ncclResult_t ncclCommCuDevice(const struct comm *comm, int *device)
{
	if (!comm || !device)
		return ncclInvalidArgument;
	*device = comm->device;
	return ncclSuccess;
}
NCCL(ncclCommCuDevice);

API ncclResult_t ncclCommUserRank(const struct comm *comm, int *rank)
{
	if (!comm || !rank)
		return ncclInvalidArgument;
	*rank = comm->rank;
	return ncclSuccess;
}
NCCL(ncclCommUserRank);
