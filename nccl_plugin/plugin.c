// SPDX-License-Identifier: Apache-2.0
/*
 * The events of all versions: a pool of running events, and records in shared memory.
 *
 * No path of NCCL takes a lock, allocates or waits. An operation becomes one record when all channels of its kernel have
 * stopped. Where the pool is full, an event is counted as dropped. Events and communicators are in static memory, so that
 * a late call of NCCL never touches freed memory.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "plugin.h"
#include "ring.h"

#define IDLE_NS 1000000000ull /* the longest sleep of the thread: of an agent that does not wake it */
#define STACK_BYTES (1 << 20) /* the C library places the static TLS of all libraries of the job on a thread's stack */
#define STALE_NS 10000000000ull /* a full pool reuses events that run longer: their ends may never be reported */
#define BUSY 0x80000000u

struct event {
	/* 0: free. BUSY, plus one for the operation until it stops, and one for each channel that has not stopped. */
	_Atomic uint32_t users;
	uint32_t type;
	uint64_t hash, seq, host_ns, count;
	uint64_t wait_ns, network_ns; /* of a step or a proxy operation: since when the network holds data, and for how long */
	uint32_t n_in_network;	      /* steps of a proxy operation whose data the network holds */
	_Atomic uint64_t first_ns, last_ns, noticed_ns;
	struct event *parent;
	void *chained;
	int rank, peer;
	uint8_t n_channels, flags, is_own;
	char func[20];
};

int chained_mask;
/* NCCL numbers the replays of a graph only if their group has a handle (2.26 to 2.30: ncclProfilerStartTaskEvents). */
static struct event group;
static struct event captured; /* the parent of all operations that were captured into a graph (version 5 and later) */
static struct event events[N_EVENTS];
static _Atomic uint32_t next_event;
static struct comm comms[N_COMMS * 16];
static _Atomic uint32_t n_comms;
static struct ring *ring;
static int ring_fd = -1;
static int *_Atomic nccl_mask;
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER; /* of communicators, and of NCCL's mask */
static int is_following;
static int n_open; /* communicators */
static uint32_t graph_mask; /* NCCL latches a captured collective's mask: without it, replays of a graph have no events */

static uint64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* A forked child shares the memory of its parent, but is another process: it starts without a ring. */
static void forget(void)
{
	if (ring)
		munmap(ring, sizeof(*ring));
	if (ring_fd >= 0)
		close(ring_fd);
	ring = NULL;
	ring_fd = -1;
	is_following = n_open = 0;
	atomic_store(&nccl_mask, NULL);
	pthread_mutex_init(&opening, NULL);
	for (int i = 0; i < N_EVENTS; i++)
		atomic_store(&events[i].users, 0);
}

static void open_ring(void)
{
	static int is_registered;
	int fd = memfd_create(RING_NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	void *memory = MAP_FAILED;

	if (fd < 0)
		return;
	if (!ftruncate(fd, sizeof(*ring)) && !fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW))
		memory = mmap(NULL, sizeof(*ring), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (memory == MAP_FAILED) {
		close(fd);
		return;
	}
	struct ring *made = memory;
	made->n_records = N_RECORDS;
	made->record_bytes = sizeof(struct ring_record);
	made->version = 1;
	made->pid = (uint32_t)getpid();
	made->magic = RING_MAGIC;
	const char *graphs = getenv("STALLSCOPE_NCCL_GRAPHS");

	graph_mask = graphs && *graphs == '1' ? EVENT_COLL | EVENT_P2P | EVENT_KERNEL_CH : 0;
	ring_fd = fd;
	ring = made;
	if (!is_registered) {
		is_registered = 1;
		pthread_atfork(NULL, NULL, forget);
	}
}

/* The events that the agent asks for; none after its lease, so that the plugin costs nothing after the agent's end. */
static uint32_t wanted(uint64_t now)
{
	return now < atomic_load(&ring->lease_ns) ? atomic_load(&ring->want) : 0;
}

static void apply_mask(uint64_t now)
{
	int *mask = atomic_load(&nccl_mask);
	uint32_t want = wanted(now);

	atomic_store(&ring->active, want);
	if (mask)
		__atomic_store_n(mask, (int)(want | graph_mask) | __atomic_load_n(&chained_mask, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
}

/*
 * A mask of 0 starts no event, so events cannot switch the plugin on: a thread follows the agent's wishes. It sleeps
 * until the agent wakes it or the lease ends.
 */
static void *follow(void *unused)
{
	(void)unused;
	for (;;) {
		uint32_t seen = atomic_load(&ring->n_switches);
		uint64_t now = now_ns(), lease = atomic_load(&ring->lease_ns);
		uint64_t sleep = now < lease && lease - now < IDLE_NS ? lease - now : IDLE_NS;
		struct timespec timeout = { (time_t)(sleep / 1000000000ull), (long)(sleep % 1000000000ull) };

		pthread_mutex_lock(&opening); /* NCCL cannot be unloaded between the read of its mask's address and the write */
		apply_mask(now);
		pthread_mutex_unlock(&opening);
		syscall(SYS_futex, &ring->n_switches, FUTEX_WAIT, seen, &timeout, NULL, 0);
	}
	return NULL;
}

static void start_following(void)
{
	pthread_t thread;
	pthread_attr_t attributes;
	size_t default_bytes;
	sigset_t all, before;

	if (is_following || !ring)
		return;
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	pthread_attr_getstacksize(&attributes, &default_bytes);
	pthread_attr_setstacksize(&attributes, STACK_BYTES);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); /* signals of the job stay with its own threads */
	is_following = !pthread_create(&thread, &attributes, follow, NULL);
	if (!is_following && !pthread_attr_setstacksize(&attributes, default_bytes))
		is_following = !pthread_create(&thread, &attributes, follow, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (is_following)
		pthread_setname_np(thread, "stallscope-nccl");
	atomic_store(&ring->has_thread, (uint32_t)is_following);
	pthread_attr_destroy(&attributes);
}

static void list_comm(uint64_t hash, const char *name, int n_nodes, int n_ranks, int rank)
{
	uint32_t slot = atomic_fetch_add(&ring->n_comms, 1) % N_COMMS;
	struct ring_comm *listed = &ring->comms[slot];

	atomic_store(&listed->comm_hash, 0);
	listed->rank = rank;
	listed->n_ranks = n_ranks;
	listed->n_nodes = n_nodes;
	listed->is_open = 1;
	memset(listed->name, 0, sizeof(listed->name));
	if (name)
		strncpy(listed->name, name, sizeof(listed->name) - 1);
	atomic_store(&listed->comm_hash, hash);
}

struct comm *new_comm(uint64_t hash, int rank)
{
	struct comm *comm = &comms[atomic_fetch_add(&n_comms, 1) % (sizeof(comms) / sizeof(comms[0]))];

	comm->hash = hash;
	comm->rank = rank;
	comm->chained = NULL;
	return comm;
}

void open_comm(struct comm *comm, int *mask, const char *name, int n_nodes, int n_ranks)
{
	pthread_mutex_lock(&opening);
	if (!ring)
		open_ring();
	if (ring) {
		if (comm->hash)
			list_comm(comm->hash, name, n_nodes, n_ranks, comm->rank);
		n_open++;
		atomic_store(&nccl_mask, mask);
		start_following();
		apply_mask(now_ns());
	}
	pthread_mutex_unlock(&opening);
}

/* After the last communicator NCCL may be unloaded, and its mask with it. */
void close_comm(struct comm *comm)
{
	struct ring *own = ring;

	for (int i = 0; own && comm && i < N_COMMS; i++)
		if (own->comms[i].comm_hash == comm->hash && own->comms[i].rank == comm->rank)
			own->comms[i].is_open = 0;
	pthread_mutex_lock(&opening);
	if (n_open > 0 && !--n_open)
		atomic_store(&nccl_mask, NULL);
	pthread_mutex_unlock(&opening);
}

static int is_call(uint64_t type)
{
	return type == EVENT_COLL_API || type == EVENT_P2P_API;
}

static int is_operation(const struct event *event)
{
	return event->type == EVENT_COLL || event->type == EVENT_P2P;
}

static void write_record(const struct event *event, uint8_t kind, uint64_t start_ns, uint64_t stop_ns, uint8_t flags)
{
	struct ring *own = ring;

	if (!own)
		return;
	uint64_t position = atomic_fetch_add(&own->head, 1);
	struct ring_record *record = &own->records[position % N_RECORDS];

	atomic_store_explicit(&record->number, 0, memory_order_relaxed);
	atomic_thread_fence(memory_order_release);
	record->comm_hash = event->hash;
	record->seq = event->seq;
	record->host_ns = event->host_ns;
	record->start_ns = start_ns;
	record->stop_ns = stop_ns;
	record->noticed_ns = atomic_load(&event->noticed_ns);
	record->count = event->count;
	record->rank = event->rank;
	record->peer = event->peer;
	record->kind = kind;
	record->flags = flags;
	record->n_channels = event->n_channels;
	memcpy(record->func, event->func, sizeof(record->func));
	atomic_store_explicit(&record->number, position + 1, memory_order_release);
}

/* The record of an operation that all users have left. */
static void complete(struct event *event, uint8_t flags)
{
	uint64_t first = atomic_load(&event->first_ns);

	if (!event->is_own || !is_operation(event))
		return;
	if (first == UINT64_MAX)
		first = 0;
	else
		flags |= HAS_GPU_TIMES;
	write_record(event, event->type == EVENT_COLL ? KIND_COLL : KIND_P2P, first, atomic_load(&event->last_ns),
		     event->flags | flags);
}

static void release(struct event *event)
{
	if ((atomic_fetch_sub(&event->users, 1) & ~BUSY) != 1)
		return;
	complete(event, 0);
	atomic_store(&event->users, 0);
}

/* Events are reused in order, so that a late child of an operation finds its parent. */
static struct event *free_event(void)
{
	for (int attempt = 0; attempt < 16; attempt++) {
		struct event *event = &events[atomic_fetch_add(&next_event, 1) % N_EVENTS];
		uint32_t users = atomic_load(&event->users);
		int is_stale = users && event->host_ns + STALE_NS < now_ns();

		if ((!users || is_stale) && atomic_compare_exchange_strong(&event->users, &users, BUSY | 1)) {
			if (is_stale)
				complete(event, IS_PARTIAL);
			return event;
		}
	}
	return NULL;
}

static void begin_operation(struct event *event, const struct operation *op)
{
	event->seq = op->seq;
	event->count = op->count;
	event->peer = op->peer;
	event->n_channels = (uint8_t)op->n_channels;
	strncpy(event->func, op->func ? op->func : "", sizeof(event->func) - 1);
	atomic_store(&event->first_ns, UINT64_MAX);
	atomic_store(&event->last_ns, 0);
	atomic_store(&event->noticed_ns, UINT64_MAX);
	/* Channels stop after the operation. Without their events the operation alone is the user. */
	if (event->is_own && (atomic_load(&ring->active) & EVENT_KERNEL_CH) && op->n_channels > 0)
		atomic_fetch_add(&event->users, (uint32_t)op->n_channels);
}

/* A channel of a recorded operation ends without its times. */
static void leave(struct event *parent)
{
	if (is_operation(parent) && (atomic_load(&parent->users) & ~BUSY)) {
		parent->flags |= IS_PARTIAL;
		release(parent);
	}
}

/*
 * Whether the handles of a proxy operation are of this process. NCCL sends the data of a rank by the proxy of another rank
 * (PXN): then the context and the parent are addresses of that rank's process.
 */
int is_of_this_process(const struct comm *comm, const void *parent, pid_t pid)
{
	const struct event *event = parent;

	return pid == getpid() && comm >= comms && comm < comms + sizeof(comms) / sizeof(comms[0]) &&
	       (!event || event == &group || event == &captured || (event >= events && event < events + N_EVENTS));
}

/* Whether the agent needs an event. Children of a recorded operation are needed after the agent switches off, too. */
static int is_needed(const struct operation *op)
{
	const struct event *parent = op->parent;

	if (op->type == EVENT_KERNEL_CH || op->type == EVENT_PROXY_STEP)
		return parent && parent->is_own;
	return ring && (atomic_load(&ring->active) & op->type) != 0;
}

/* Whether the call of an operation was captured into a graph: then each replay starts the operation anew. */
static int is_of_replay(const struct event *call)
{
	return call == &captured || (call && is_call(call->type) && (call->flags & IS_REPLAY));
}

static void *start_recorded(struct comm *comm, const struct operation *op, int is_chained)
{
	struct ring *own = ring;
	int is_own = is_needed(op);
	struct event *event;

	if (!is_own && !is_chained)
		return NULL;
	event = free_event();
	if (!event) {
		if (own)
			atomic_fetch_add(&own->n_dropped, 1);
		if (is_own && op->type == EVENT_KERNEL_CH)
			leave(op->parent);
		return NULL;
	}
	if (own)
		atomic_fetch_add(&own->n_events, 1);
	event->type = (uint32_t)op->type;
	event->hash = op->comm_hash ? op->comm_hash : comm ? comm->hash : 0;
	event->rank = op->comm_hash || !comm ? op->rank : comm->rank;
	event->chained = NULL;
	event->parent = op->parent;
	event->host_ns = now_ns();
	event->flags = op->is_captured ? IS_REPLAY : 0;
	event->is_own = (uint8_t)is_own;
	event->wait_ns = event->network_ns = event->n_in_network = 0;
	memset(event->func, 0, sizeof(event->func));
	if (is_operation(event)) {
		if (is_of_replay(op->parent))
			event->flags |= IS_REPLAY;
		begin_operation(event, op);
	} else if (op->type == EVENT_KERNEL_CH) {
		event->flags = op->has_gpu_clock ? 0 : ON_HOST_CLOCK;
		atomic_store(&event->first_ns, op->has_gpu_clock ? op->gpu_ns : event->host_ns);
		atomic_store(&event->last_ns, 0);
	} else if (op->type == EVENT_PROXY_OP) {
		event->peer = op->peer;
		event->n_channels = (uint8_t)op->n_channels;
		event->flags = op->is_send ? IS_SEND : 0;
	}
	return event;
}

void *start_event(struct comm *comm, const struct operation *op, int is_chained)
{
	void *handle = start_recorded(comm, op, is_chained);

	if (handle || !graph_mask)
		return handle;
	if (is_call(op->type) && op->is_captured)
		return &captured;
	return op->type == EVENT_GROUP ? &group : NULL;
}

static void lower(_Atomic uint64_t *least, uint64_t value)
{
	uint64_t known = atomic_load(least);

	while (value < known && !atomic_compare_exchange_weak(least, &known, value))
		;
}

static void raise_to(_Atomic uint64_t *most, uint64_t value)
{
	uint64_t known = atomic_load(most);

	while (value > known && !atomic_compare_exchange_weak(most, &known, value))
		;
}

/* A channel of a kernel has stopped: its times count for the operation, which has one user less. */
static void stop_channel(struct event *channel)
{
	struct event *parent = channel->parent;
	uint64_t stop_ns = atomic_load(&channel->last_ns);

	if (!channel->is_own || !is_operation(parent) || !(atomic_load(&parent->users) & ~BUSY))
		return;
	if (channel->flags & ON_HOST_CLOCK)
		stop_ns = now_ns();
	lower(&parent->noticed_ns, channel->host_ns);
	lower(&parent->first_ns, atomic_load(&channel->first_ns));
	raise_to(&parent->last_ns, stop_ns);
	parent->flags |= channel->flags;
	release(parent);
}

/* NCCL sends up to eight steps of an operation at the same time: the time in which the network holds any of them counts. */
static void enter_network(struct event *step)
{
	if (step->wait_ns || !step->parent)
		return;
	step->wait_ns = now_ns();
	if (!step->parent->n_in_network++)
		step->parent->wait_ns = step->wait_ns;
}

static void leave_network(struct event *step)
{
	if (!step->wait_ns || !step->parent)
		return;
	step->wait_ns = 0;
	if (!--step->parent->n_in_network)
		step->parent->network_ns += now_ns() - step->parent->wait_ns;
}

void stop_event(void *handle)
{
	struct event *event = handle;

	if (!event || event == &group || event == &captured)
		return;
	if (event->type == EVENT_KERNEL_CH) {
		stop_channel(event);
	} else if (event->type == EVENT_PROXY_STEP) {
		leave_network(event);
	} else if (event->type == EVENT_PROXY_OP && event->is_own) {
		struct event *parent = event->parent;

		event->seq = parent ? parent->seq : 0;
		if (parent)
			memcpy(event->func, parent->func, sizeof(event->func));
		write_record(event, KIND_PROXY, now_ns() - event->host_ns, event->network_ns, event->flags);
	}
	release(event);
}

void set_state(void *handle, int state, const union state_args *args)
{
	struct event *event = handle;

	if (!event)
		return;
	if (event->type == EVENT_KERNEL_CH && state == STATE_KERNEL_STOP && args) {
		atomic_store(&event->last_ns, args->gpu_ns);
	} else if (event->type == EVENT_PROXY_STEP) {
		if (state == STATE_SEND_WAIT || state == STATE_RECV_WAIT)
			enter_network(event);
		else if (state == STATE_RECV_FLUSH || state == STATE_RECV_GPU)
			leave_network(event);
	}
}

void set_chained(void *handle, void *chained)
{
	((struct event *)handle)->chained = chained;
}

void *chained_handle(void *handle)
{
	return handle ? ((struct event *)handle)->chained : NULL;
}
