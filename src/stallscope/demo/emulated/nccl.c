/*
 * libnccl.so.2, emulated: collectives, messages and groups, with the names and calling conventions of NCCL 2.28.
 *
 * A call only enqueues: the collective meets its peers on the stream's own thread (meet.h) and takes a time
 * that follows from its size. A communicator is to be used on one stream at a time.
 */
#include "collective.h"
#include "group.h"
#include "nccl_names.h"

API ncclResult_t ncclGroupStart(void)
{
	group_begin();
	return ncclSuccess;
}
NCCL(ncclGroupStart);

API ncclResult_t ncclGroupEnd(void)
{
	return group_is_open() ? group_end() : ncclInvalidUsage;
}
NCCL(ncclGroupEnd);

#define PART(kind_, send_, recv_, count_, type_, op_, root_)                                                    \
	((struct part){ .comm = comm, .stream = stream, .kind = kind_, .send = send_, .recv = recv_,            \
			.count = count_, .datatype = type_, .reduce_op = op_, .root = root_ })

API ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, int datatype, int op,
			       struct comm *comm, void *stream)
{
	return group_submit(PART(ALL_REDUCE, sendbuff, recvbuff, count, datatype, op, 0));
}
NCCL(ncclAllReduce);

API ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount, int datatype, struct comm *comm,
			       void *stream)
{
	return group_submit(PART(ALL_GATHER, sendbuff, recvbuff, sendcount, datatype, 0, 0));
}
NCCL(ncclAllGather);

API ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount, int datatype, int op,
				   struct comm *comm, void *stream)
{
	return group_submit(PART(REDUCE_SCATTER, sendbuff, recvbuff, recvcount, datatype, op, 0));
}
NCCL(ncclReduceScatter);

API ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count, int datatype, int root,
			       struct comm *comm, void *stream)
{
	return group_submit(PART(BROADCAST, sendbuff, recvbuff, count, datatype, 0, root));
}
NCCL(ncclBroadcast);

API ncclResult_t ncclBcast(void *buff, size_t count, int datatype, int root, struct comm *comm, void *stream)
{
	return group_submit(PART(BROADCAST, buff, buff, count, datatype, 0, root));
}
NCCL(ncclBcast);

API ncclResult_t ncclReduce(const void *sendbuff, void *recvbuff, size_t count, int datatype, int op, int root,
			    struct comm *comm, void *stream)
{
	return group_submit(PART(REDUCE, sendbuff, recvbuff, count, datatype, op, root));
}
NCCL(ncclReduce);

API ncclResult_t ncclAlltoAll(const void *sendbuff, void *recvbuff, size_t count, int datatype, struct comm *comm,
			      void *stream)
{
	return group_submit(PART(ALL_TO_ALL, sendbuff, recvbuff, count, datatype, 0, 0));
}
NCCL(ncclAlltoAll);

API ncclResult_t ncclGather(const void *sendbuff, void *recvbuff, size_t count, int datatype, int root,
			    struct comm *comm, void *stream)
{
	return group_submit(PART(GATHER, sendbuff, recvbuff, count, datatype, 0, root));
}
NCCL(ncclGather);

API ncclResult_t ncclScatter(const void *sendbuff, void *recvbuff, size_t count, int datatype, int root,
			     struct comm *comm, void *stream)
{
	return group_submit(PART(SCATTER, sendbuff, recvbuff, count, datatype, 0, root));
}
NCCL(ncclScatter);

API ncclResult_t ncclSend(const void *sendbuff, size_t count, int datatype, int peer, struct comm *comm, void *stream)
{
	return group_submit(PART(SEND, sendbuff, NULL, count, datatype, 0, peer));
}
NCCL(ncclSend);

API ncclResult_t ncclRecv(void *recvbuff, size_t count, int datatype, int peer, struct comm *comm, void *stream)
{
	return group_submit(PART(RECV, NULL, recvbuff, count, datatype, 0, peer));
}
NCCL(ncclRecv);
