/* See profiler.h. NVIDIA/nccl 5067397c: src/include/plugin/profiler/profiler_v5.h. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "profiler.h"

enum { GROUP = 1 << 0, COLL = 1 << 1, KERNEL_CH = 1 << 6, KERNEL_STOP = 22 };

struct description {
	uint64_t type;
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
			void *group;
		} coll;
		struct {
			uint8_t channel;
			uint64_t gpu_ns;
		} kernel;
		char space[88];
	};
};

struct plugin {
	const char *name;
	int (*init)(void **context, uint64_t hash, int *mask, const char *comm_name, int n_nodes, int n_ranks, int rank,
		    void *log);
	int (*start)(void *context, void **handle, struct description *description);
	int (*stop)(void *handle);
	int (*state)(void *handle, int state, uint64_t *gpu_ns);
	int (*finalize)(void *context);
};

static const char *const names[] = { "AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce",
				     "AlltoAll",  "Gather",    "Scatter" };
static const struct plugin *plugin;
static int mask;

static void load(void)
{
	const char *path = getenv("NCCL_PROFILER_PLUGIN");
	void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;

	plugin = library ? dlsym(library, "ncclProfiler_v5") : NULL;
}

static void open_comm(struct comm *comm)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	uint64_t hash = 14695981039346656037ull;

	pthread_once(&once, load);
	comm->is_profiled = true;
	for (int i = 0; i < ID_BYTES; i++)
		hash = (hash ^ comm->id[i]) * 1099511628211ull;
	if (plugin)
		plugin->init(&comm->profiler, hash, &mask, "", 1, comm->nranks, comm->rank, NULL);
}

static void *started(struct comm *comm, enum kind kind, size_t count, uint64_t seq)
{
	struct description description = { .type = COLL, .rank = comm->rank };
	void *event = NULL;

	description.coll.seq = seq;
	description.coll.func = names[kind];
	description.coll.count = count;
	description.coll.n_channels = 1;
	plugin->start(comm->profiler, &event, &description);
	if (event)
		plugin->stop(event);
	return event;
}

int profiler_mask(struct comm *comm)
{
	if (!comm->is_profiled)
		open_comm(comm);
	return __atomic_load_n(&mask, __ATOMIC_RELAXED);
}

void *profiler_enqueued(struct comm *comm, enum kind kind, size_t count)
{
	uint64_t seq;

	if (kind == SEND || kind == RECV)
		return NULL;
	seq = comm->n_calls[kind]++;
	return (profiler_mask(comm) & KERNEL_CH) && plugin ? started(comm, kind, count, seq) : NULL;
}

void *profiler_replayed(struct comm *comm, enum kind kind, size_t count, int captured_mask)
{
	struct description description = { .type = GROUP, .rank = comm->rank };
	void *group = NULL, *event;

	if (kind == SEND || kind == RECV || !plugin || !(captured_mask & KERNEL_CH))
		return NULL;
	plugin->start(comm->profiler, &group, &description);
	event = started(comm, kind, count, comm->n_calls[kind]);
	if (group) {
		comm->n_calls[kind]++;
		plugin->stop(group);
	}
	return event;
}

void profiler_ran(const struct comm *comm, void *event, int64_t start_ns, int64_t end_ns)
{
	struct description description = { .type = KERNEL_CH, .parent = event, .rank = comm->rank };
	uint64_t stop_ns = (uint64_t)end_ns;
	void *channel = NULL;

	if (!event)
		return;
	description.kernel.gpu_ns = (uint64_t)start_ns;
	plugin->start(comm->profiler, &channel, &description);
	if (!channel)
		return;
	plugin->state(channel, KERNEL_STOP, &stop_ns);
	plugin->stop(channel);
}
