/* Functions with the names and calling conventions of NCCL and CUDA that only spend time: the targets of probes.
 * They start with a push, like the real functions. The first two arguments of the CUDA functions are times in us:
 * asleep, on the CPU. */
#include <stddef.h>
#include <string.h>
#include <time.h>

#define API __attribute__((visibility("default"), noinline, optimize("O0")))

typedef struct {
	char internal[128];
} ncclUniqueId;

static volatile long sink;

static long now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000L + t.tv_nsec;
}

static int spend(long sleep_us, long spin_us)
{
	struct timespec t = {sleep_us / 1000000, sleep_us % 1000000 * 1000};
	long end;

	if (sleep_us)
		clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
	end = now_ns() + spin_us * 1000;
	while (spin_us && now_ns() < end)
		;
	return 0;
}

API int cudaSetDevice(int device)
{
	sink += device;
	return 0;
}

API int cudaStreamSynchronize(long sleep_us, long spin_us)
{
	return spend(sleep_us, spin_us);
}

API int cudaMalloc(long sleep_us, long spin_us)
{
	return spend(sleep_us, spin_us);
}

API int cudaFree(long result)
{
	return (int)result;
}

API int cuMemcpyHtoD_v2(long sleep_us, long spin_us, size_t bytes)
{
	sink += bytes;
	return spend(sleep_us, spin_us);
}

/* A runtime call that calls the driver, as they do. */
API int cudaMemcpy(long sleep_us, long spin_us, size_t bytes, int kind)
{
	sink += kind;
	spend(0, spin_us);
	return cuMemcpyHtoD_v2(sleep_us, 0, bytes);
}

static char graphs[16];

API int cudaStreamBeginCapture(void *stream, int mode)
{
	sink += mode;
	return stream == (void *)13 ? 1 : 0;
}

API int cudaStreamEndCapture(void *stream, void **graph)
{
	*graph = &graphs[1];
	return stream == (void *)13 ? 1 : 0;
}

API int cudaGraphInstantiate(void **executable, void *graph, unsigned long long flags)
{
	sink += flags + (graph != NULL);
	*executable = &graphs[2];
	return 0;
}

API int cuGraphLaunch(void *executable, void *stream)
{
	sink += executable != stream;
	return 0;
}

API int cudaGraphLaunch(void *executable, void *stream)
{
	return cuGraphLaunch(executable, stream);
}

API int ncclAllReduce(const void *send, void *recv, size_t count, int datatype, int op, void *comm, void *stream)
{
	sink += count + datatype + op;
	return 0;
}

API int ncclBroadcast(const void *send, void *recv, size_t count, int datatype, int root, void *comm, void *stream)
{
	sink += count + datatype + root;
	return 0;
}

API int ncclBcast(void *buffer, size_t count, int datatype, int root, void *comm, void *stream)
{
	return ncclBroadcast(buffer, buffer, count, datatype, root, comm, stream);
}

API int ncclReduce(const void *send, void *recv, size_t count, int datatype, int op, int root, void *comm, void *stream)
{
	sink += count + datatype + op + root;
	return 0;
}

API int ncclSend(const void *send, size_t count, int datatype, int peer, void *comm, void *stream)
{
	sink += count + datatype + peer;
	return 0;
}

API int ncclRecv(void *recv, size_t count, int datatype, int peer, void *comm, void *stream)
{
	sink += count + datatype + peer;
	return 0;
}

API int ncclGroupStart(void)
{
	sink++;
	return 0;
}

API int ncclGroupEnd(void)
{
	sink++;
	return 0;
}

API int ncclGroupSimulateEnd(void *info)
{
	sink += info != NULL;
	return 0;
}

API int ncclReduceConfig(const void *send, void *recv, size_t count, int datatype, int op, int root, void *comm,
			 void *stream, const void *config)
{
	return ncclReduce(send, recv, count, datatype, op, root, comm, stream);
}

API int ncclPutSignal(const void *send, size_t count, int datatype, int peer, void *window, size_t offset, int index,
		      int context, unsigned int flags, void *comm, void *stream)
{
	sink += count + datatype + peer + offset + index + context + flags;
	return 0;
}

API int ncclWaitSignal(int n, void *descriptions, void *comm, void *stream)
{
	sink += n;
	return 0;
}

API int ncclCommWindowRegister(void *comm, void *buffer, size_t bytes, void **window, int flags)
{
	sink += bytes + flags;
	spend(comm ? 400000 : 0, 0);
	return 0;
}

static char comms[64][16];
static int n_comms;

API int ncclCommInitRankConfig(void **comm, int nranks, ncclUniqueId id, int rank, void *config)
{
	sink += id.internal[rank] + nranks;
	*comm = comms[n_comms++ % 64];
	return 0;
}

API int ncclCommInitRank(void **comm, int nranks, ncclUniqueId id, int rank)
{
	return ncclCommInitRankConfig(comm, nranks, id, rank, NULL);
}

API int ncclCommInitRankScalable(void **comm, int nranks, int rank, int n_ids, ncclUniqueId *ids, void *config)
{
	sink += ids[0].internal[rank] + n_ids + nranks;
	*comm = comms[n_comms++ % 64];
	return 0;
}

API int ncclCommInitAll(void **made, int n, const int *devices)
{
	ncclUniqueId id;

	memset(&id, 7, sizeof(id));
	ncclGroupStart();
	for (int i = 0; i < n; i++)
		ncclCommInitRank(&made[i], n, id, i);
	return ncclGroupEnd();
}

API int ncclCommSplit(void *comm, int color, int key, void **made, void *config)
{
	sink += key;
	*made = color < 0 ? NULL : comms[n_comms++ % 64];
	return 0;
}

API int ncclCommShrink(void *comm, int *excluded, int n, void **made, void *config, int flags)
{
	sink += n;
	*made = comms[n_comms++ % 64];
	return 0;
}

API int ncclCommGrow(void *comm, int nranks, const ncclUniqueId *id, int rank, void **made, void *config)
{
	sink += nranks + rank + (id != NULL);
	*made = comms[n_comms++ % 64];
	return 0;
}

API int ncclCommDestroy(void *comm)
{
	sink += comm != NULL;
	return 0;
}
