// SPDX-License-Identifier: Apache-2.0
/*
 * Calls a profiler plugin as NCCL does, with own declarations of the interface (NVIDIA/nccl 5067397c, src/plugin/profiler.cc
 * and src/include/plugin/profiler; version 7: 88980683): the mask is latched for each operation, a thread reports the channels of the kernels,
 * and the events of a group enclose the events of its operations.
 *
 * emulated_nccl PLUGIN VERSION. Each line of input is a command:
 *   run N CHANNELS PAUSE_US   N collectives of CHANNELS channels, GPU times 1000 * seq + channel and 500 ns later
 *   pxn N                   N operations of the proxy for another process: its addresses are not of this process
 *   pipeline N              N operations of the proxy with eight steps at the same time
 *   p2p N | proxy N | fork N | destroy N | mask | quit
 *   close                   destroy the communicator and close the plugin's library, as after the last communicator
 *   open                    the same again after close
 *   capture                 latch the mask for later replays of a graph, and report the captured call
 *   replay N CHANNELS       N replays of a collective; NCCL numbers them only if their group has a handle
 *   clone                   a child without the C library's handlers, which lives for a minute; reports its process id
 */
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef struct {
	uint8_t type;
	void *parentObj;
	int rank;
	union {
		struct { const char *name; uint64_t hash, seq; const char *func; const void *a; void *b; size_t count; int root;
			 const char *datatype; uint8_t nMaxChannels, nWarps; const char *algo, *proto; } coll;
		struct { const char *name; uint64_t hash; const char *func; void *b; const char *datatype; size_t count; int peer; } p2p;
		struct { pid_t pid; uint8_t channelId; int peer, nSteps, chunkSize, isSend; } proxyOp;
		struct { int step; } proxyStep;
		struct { uint8_t channelId; } kernelCh;
	};
} Old;
typedef struct {
	uint64_t type;
	void *parentObj;
	int rank;
	union {
		struct { uint64_t seq; const char *func; const void *a; void *b; size_t count; int root; const char *datatype;
			 uint8_t nChannels, nWarps; const char *algo, *proto; void *parentGroup; const char *kernelVariant; bool isSymColl;
			 uint64_t userTag; } coll;
		struct { const char *func; void *b; const char *datatype; size_t count; int peer; uint8_t nChannels; void *parentGroup; } p2p;
		struct { pid_t pid; uint8_t channelId; int peer, nSteps, chunkSize, isSend; } proxyOp;
		struct { int step; } proxyStep;
		struct { uint8_t channelId; uint64_t pTimer; } kernelCh;
		struct { bool graphCaptured; int groupDepth; } groupApi;
		struct { const char *func; size_t count; const char *datatype; int root; void *stream; bool graphCaptured; } collApi;
		struct { const char *func; size_t count; const char *datatype; void *stream; bool graphCaptured; } p2pApi;
		struct { void *stream; } kernelLaunch;
	};
} New;
typedef union { uint64_t pTimer; size_t bytes; } Args;
typedef struct { const char *name; void *init; int (*start)(void *, void **, void *); int (*stop)(void *); int (*state)(void *, int, Args *);
		 int (*finalize)(void *); } Plugin;

enum { GROUP = 1, COLL = 2, P2P = 4, PROXY_OP = 8, PROXY_STEP = 16, KERNEL_CH = 64, GROUP_API = 256, COLL_API = 512, P2P_API = 1024, KERNEL_LAUNCH = 2048, KERNEL_PHASE = 1 << 15 };
static Plugin *plugin;
static void *library;
static int version, mask, captured;
static void *context, *captured_call;
static bool is_capturing;
static pid_t of_proxy; /* the process of a proxy operation */
static uint64_t seq;
#ifdef TLS_BYTES /* of the libraries of a job: each thread's stack holds a copy */
static __thread volatile char tls[TLS_BYTES] = { 1 };
#endif

static void *start(uint64_t type, void *parent, void *group, uint64_t gpu, int channels)
{
	void *handle = (void *)1;
	Old old;
	New new;

	memset(&old, 0xee, sizeof(old)); /* NCCL does not initialise all bytes of old descriptions */
	memset(&new, 0, sizeof(new));
	if (version == 4)
		memset((char *)&new + 1, 0xee, 7);
	old.type = (uint8_t)type;
	*(uint8_t *)&new = (uint8_t)type;
	if (version > 4)
		new.type = type;
	old.parentObj = new.parentObj = parent;
	old.rank = new.rank = 3;
	if (type == COLL) {
		old.coll.name = "world"; old.coll.hash = 0xabc; old.coll.seq = new.coll.seq = seq;
		old.coll.func = new.coll.func = "AllReduce"; old.coll.count = new.coll.count = 4096;
		old.coll.nMaxChannels = new.coll.nChannels = (uint8_t)channels;
		if (version > 4)
			new.coll.parentGroup = group;
		if (version > 6)
			new.coll.userTag = seq + 1000;
	} else if (type == P2P) {
		old.p2p.name = "world"; old.p2p.hash = 0xabc; old.p2p.func = new.p2p.func = "Send"; old.p2p.count = new.p2p.count = 7;
		old.p2p.peer = new.p2p.peer = 5;
		new.p2p.nChannels = (uint8_t)channels;
		if (version > 4)
			new.p2p.parentGroup = group;
	} else if (type == KERNEL_CH) {
		old.kernelCh.channelId = new.kernelCh.channelId = (uint8_t)channels;
		new.kernelCh.pTimer = gpu;
	} else if (type == GROUP_API) {
		new.groupApi.graphCaptured = is_capturing;
	} else if (type == COLL_API) {
		new.collApi.func = "AllReduce"; new.collApi.count = 4096; new.collApi.graphCaptured = is_capturing;
	} else if (type == P2P_API) {
		new.p2pApi.func = "Send"; new.p2pApi.count = 7; new.p2pApi.graphCaptured = is_capturing;
	} else if (type == PROXY_OP) {
		old.proxyOp.pid = new.proxyOp.pid = of_proxy;
		old.proxyOp.peer = new.proxyOp.peer = 2; old.proxyOp.isSend = new.proxyOp.isSend = 1;
		old.proxyOp.channelId = new.proxyOp.channelId = 0;
	}
	plugin->start(context, &handle, version == 3 ? (void *)&old : (void *)&new);
	return handle;
}

static int now_latched(void)
{
	return __atomic_load_n(&mask, __ATOMIC_RELAXED);
}

static void stop(void *handle) { if (handle) plugin->stop(handle); }

struct kernel { void *operation; uint64_t seq; int channels; };
static struct kernel queue[4096];
static volatile unsigned n_queued, n_done;

/* The proxy thread: reports the channels of each kernel after the host has enqueued it. */
static void *progress(void *unused)
{
	(void)unused;
	for (;;) {
		while (n_done == n_queued)
			usleep(20);
		struct kernel *k = &queue[n_done % 4096];
		void *handles[64];

		for (int c = 0; k->operation && c < k->channels; c++)
			handles[c] = start(KERNEL_CH, k->operation, NULL, 1000 * k->seq + (uint64_t)c, c);
		for (int c = 0; k->operation && c < k->channels; c++) {
			Args args = { .pTimer = 1000 * k->seq + (uint64_t)c + 500 };

			if (version > 6 && (now_latched() & KERNEL_PHASE) && handles[c]) {
				void *phase = start(KERNEL_PHASE, handles[c], NULL, 1000 * k->seq, c);

				if (phase)
					plugin->state(phase, 22, &args);
				stop(phase);
			}
			if (handles[c] && version > 3)
				plugin->state(handles[c], 22, &args);
			stop(handles[c]);
		}
		__sync_synchronize();
		n_done = n_done + 1;
	}
	return NULL;
}

/* The call of an operation: NCCL reports it from version 5 on, whatever part of the operation the mask asks for. */
static void *call(uint64_t type, int latched)
{
	if (version < 5 || !(latched & (COLL | P2P | KERNEL_CH)))
		return NULL;
	void *group = start(GROUP_API, NULL, NULL, 0, 0);
	void *handle = start(type == P2P ? P2P_API : COLL_API, group, NULL, 0, 0);

	stop(handle);
	stop(group);
	return handle;
}

static void operate(uint64_t type, int channels, int latched, bool is_replay)
{
	void *caller = is_replay ? captured_call : call(type, latched);
	void *group = latched ? start(GROUP, NULL, NULL, 0, 0) : NULL, *operation = NULL;

	if (latched & KERNEL_PHASE)
		latched |= KERNEL_CH; /* as NCCL does: phases are children of a channel */
	if (latched & (COLL | P2P | KERNEL_CH))
		operation = start(type, version > 4 ? caller : group, group, 0, channels);
	if (version > 4 && latched)
		stop(start(KERNEL_LAUNCH, group, NULL, 0, 0));
	if (latched & KERNEL_CH) {
		while (n_queued - n_done > 4000)
			usleep(20);
		queue[n_queued % 4096] = (struct kernel){ operation, seq, channels };
		__sync_synchronize();
		n_queued = n_queued + 1;
	}
	stop(operation);
	stop(group);
	if (!is_replay || (group && (latched & KERNEL_CH)))
		seq++;
}

static void proxy(void)
{
	void *operation = start(COLL, NULL, NULL, 0, 0), *op = start(PROXY_OP, operation, NULL, 0, 0);

	for (int i = 0; i < 3; i++) {
		void *step = start(PROXY_STEP, op, NULL, 0, 0);

		if (step) {
			plugin->state(step, 8, NULL); /* the GPU fills the buffer */
			usleep(2000);
			plugin->state(step, 9, NULL); /* the network sends it */
			usleep(10000);
			stop(step);
		}
	}
	stop(op);
	stop(operation);
	seq++;
}

static void pipeline(void)
{
	void *operation = start(COLL, NULL, NULL, 0, 0), *op = start(PROXY_OP, operation, NULL, 0, 0), *steps[8];

	for (int i = 0; i < 8; i++)
		if ((steps[i] = start(PROXY_STEP, op, NULL, 0, 0)))
			plugin->state(steps[i], 9, NULL);
	usleep(10000);
	for (int i = 0; i < 8; i++)
		stop(steps[i]);
	stop(op);
	stop(operation);
	seq++;
}

static void pxn(void)
{
	void *own = context, *op;

	context = (void *)0x1000;
	of_proxy = getppid();
	op = start(PROXY_OP, (void *)0x2000, NULL, 0, 0);
	context = own;
	of_proxy = getpid();
	stop(start(PROXY_STEP, op, NULL, 0, 0));
	stop(op);
}

static uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static bool load(const char *path)
{
	char symbol[32];

	library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	snprintf(symbol, sizeof(symbol), "ncclProfiler_v%d", version);
	plugin = library ? dlsym(library, symbol) : NULL;
	return plugin;
}

static void init(void)
{
	if (version == 3)
		((int (*)(void **, int *))plugin->init)(&context, &mask);
	else if (version == 4)
		((int (*)(void **, int *, const char *, uint64_t, int, int, int, void *))plugin->init)(&context, &mask, "world", 0xabc, 2, 16, 3, NULL);
	else
		((int (*)(void **, uint64_t, int *, const char *, int, int, int, void *))plugin->init)(&context, 0xabc, &mask, "world", 2, 16, 3, NULL);
}

static void drained(void)
{
	while (n_done != n_queued)
		usleep(50);
}

int main(int argc, char **argv)
{
	char line[128], word[32];
	pthread_t thread;

	version = argc > 2 ? atoi(argv[2]) : 0;
	if (argc < 3 || !load(argv[1])) {
		fprintf(stderr, "cannot load: %s\n", dlerror());
		return 2;
	}
#ifdef TLS_BYTES
	tls[TLS_BYTES - 1] = 1;
#endif
	of_proxy = getpid();
	init();
	pthread_create(&thread, NULL, progress, NULL);
	printf("ready %d\n", (int)getpid());
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		int n = 0, channels = 4, pause_us = 0, failed = 0;
		uint64_t begin = now();

		sscanf(line, "%31s %d %d %d", word, &n, &channels, &pause_us);
		if (!strcmp(word, "quit"))
			break;
		for (int i = 0; !strcmp(word, "run") && i < n; i++) {
			operate(COLL, channels, now_latched(), false);
			if (pause_us)
				usleep((useconds_t)pause_us);
		}
		for (int i = 0; !strcmp(word, "p2p") && i < n; i++)
			operate(P2P, 1, now_latched(), false);
		if (!strcmp(word, "capture")) {
			captured = now_latched();
			is_capturing = true;
			captured_call = call(COLL, captured);
			is_capturing = false;
		}
		for (int i = 0; !strcmp(word, "replay") && i < n; i++)
			operate(COLL, channels, captured, true);
		for (int i = 0; !strcmp(word, "proxy") && i < n; i++)
			proxy();
		for (int i = 0; !strcmp(word, "pipeline") && i < n; i++)
			pipeline();
		for (int i = 0; !strcmp(word, "pxn") && i < n; i++)
			pxn();
		if (!strcmp(word, "fork")) {
			pid_t child = fork();

			if (!child) { /* no thread of NCCL is in the child; it makes a communicator of its own */
				init();
				for (int i = 0; i < n; i++)
					stop(start(COLL, NULL, NULL, 0, 0));
				_exit(0);
			}
			waitpid(child, &failed, 0);
		}
		if (!strcmp(word, "clone")) {
			failed = (int)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
			if (!failed) {
				alarm(60);
				prctl(PR_SET_PDEATHSIG, SIGKILL);
				for (;;)
					pause();
			}
		}
		if (!strcmp(word, "destroy")) { /* kernels are still in progress */
			for (int i = 0; i < n; i++)
				operate(COLL, channels, now_latched(), false);
			plugin->finalize(context);
		}
		if (!strcmp(word, "close")) {
			drained();
			plugin->finalize(context);
			dlclose(library);
		}
		if (!strcmp(word, "open")) {
			if (!load(argv[1]))
				return 2;
			init();
		}
		if (strcmp(word, "destroy"))
			drained();
		printf("done %d mask %d ns %llu\n", failed, __atomic_load_n(&mask, __ATOMIC_RELAXED), (unsigned long long)(now() - begin));
		fflush(stdout);
	}
	return 0;
}
