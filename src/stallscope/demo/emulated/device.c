/* Streams and their threads: see device.h. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "clock.h"
#include "device.h"

#define SPIN_NS 20000
#define SLICE_NS 100000
#define NOBODY UINT64_MAX
#define OWNER_CHECK_NS 100000000
#define STACK_BYTES (256 << 10)
#define SHARED_WITH_OWNER (CLONE_VM | CLONE_FILES | CLONE_FS)

struct stream {
	int device;
	struct stream *next;
	pthread_t thread;
	pthread_mutex_t lock; /* among the enqueueing threads */
	struct graph *capture;
	_Atomic uint64_t n_enqueued;
	_Atomic uint32_t todo_bell, is_idle, is_closing, pid;
	struct counter finished;
	char *stack;
	int64_t free_ns; /* when the last work ended, on the device's own account */
	struct work ring[QUEUE_DEPTH];
};

_Atomic uint32_t schedule_flags;

static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream *streams;
static struct stream *defaults[MAX_DEVICES];
static int owner_fd = -1; /* readable once the process has ended */
static const _Atomic int64_t *turns; /* see foreign_turns; NULL: no other process uses the devices */

void counter_set(struct counter *counter, uint64_t value)
{
	counter->value = value;
	if (value < counter->wanted)
		return;
	counter->wanted = NOBODY; /* threads that are not served yet register again */
	counter->bell++;
	futex_wake_all(&counter->bell);
}

static void want(struct counter *counter, uint64_t value)
{
	uint64_t wanted = counter->wanted;

	while (value < wanted && !atomic_compare_exchange_weak(&counter->wanted, &wanted, value))
		;
}

/* Returns true when the value is reached; otherwise sleeps for a while, or until it is reached. */
static bool sleep_for(struct counter *counter, uint64_t value, int64_t timeout_ns)
{
	uint32_t bell = counter->bell;

	want(counter, value);
	if (counter->value >= value)
		return true;
	futex_wait(&counter->bell, bell, timeout_ns);
	return false;
}

void counter_wait_device(struct counter *counter, uint64_t value)
{
	while (!sleep_for(counter, value, OWNER_CHECK_NS))
		emulated_end_with_owner();
}

void counter_wait_host(struct counter *counter, uint64_t value)
{
	uint32_t how = schedule_flags & 7;
	int64_t until = how == 0 ? now_ns() + SPIN_NS : how == 4 ? 0 : INT64_MAX;

	while (counter->value < value) {
		if (now_ns() >= until)
			sleep_for(counter, value, -1);
		else if (how == 2)
			sched_yield();
		else
			relax();
	}
}

/* As defined by the kernel (include/uapi/linux/sched/types.h); libc does not define it. */
struct sched_attributes {
	uint32_t size, policy;
	uint64_t flags;
	int32_t nice;
	uint32_t priority;
	uint64_t slice_ns, deadline_ns, period_ns;
};

/*
 * Hardware takes no part in the competition for CPUs: any CPU, ahead of the job's threads if allowed. Not by a
 * real-time policy: such a task wakes where it ran last, and pushes a rank aside though another CPU is idle.
 */
static void become_hardware(void)
{
	struct sched_attributes first = { .size = sizeof(first), .nice = -20, .slice_ns = SLICE_NS };
	cpu_set_t all;

	prctl(PR_SET_NAME, "emulated-gpu");
	prctl(PR_SET_TIMERSLACK, 1);
	memset(&all, 0xff, sizeof(all));
	sched_setaffinity(0, sizeof(all), &all);
	if (syscall(SYS_sched_setattr, 0, &first, 0)) {
		first.nice = 0;
		syscall(SYS_sched_setattr, 0, &first, 0);
	}
}

void emulated_end_with_owner(void)
{
	struct pollfd owner = { .fd = owner_fd, .events = POLLIN };

	if (poll(&owner, 1, 0) == 1 && owner.revents & POLLIN)
		syscall(SYS_exit_group, 0);
}

/*
 * A device that other processes also use works in turns. $EMULATED_GPU_TURNS names a file of one int64 a device: the
 * time (monotonic ns) until which it belongs to another process.
 */
static const _Atomic int64_t *foreign_turns(void)
{
	const char *path = getenv("EMULATED_GPU_TURNS");
	int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	void *turns = MAP_FAILED;

	if (fd >= 0) {
		turns = mmap(NULL, MAX_DEVICES * sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
		close(fd);
	}
	return turns == MAP_FAILED ? NULL : turns;
}

static int64_t ours_from(int device, int64_t begin)
{
	int64_t until = turns ? turns[device] : 0;

	return until > begin ? until : begin;
}

void stream_execute(struct stream *stream, const struct work *work)
{
	int64_t begin = stream->free_ns > work->enqueued_ns ? stream->free_ns : work->enqueued_ns;
	int64_t end = (work->busy_ns ? ours_from(stream->device, begin) : begin) + work->busy_ns;

	if (end > now_ns())
		sleep_until(end);
	stream->free_ns = end;
	if (!work->run)
		return;
	work->run(stream, work->arg, work->n);
	if (stream->free_ns < now_ns())
		stream->free_ns = now_ns();
}

static bool wait_for_work(struct stream *stream, uint64_t n_done)
{
	while (stream->n_enqueued == n_done) {
		uint32_t bell = stream->todo_bell;

		if (stream->is_closing)
			return false;
		stream->is_idle = 1;
		if (stream->n_enqueued == n_done && !stream->is_closing)
			futex_wait(&stream->todo_bell, bell, OWNER_CHECK_NS);
		stream->is_idle = 0;
		emulated_end_with_owner();
	}
	return true;
}

static int serve(void *arg)
{
	struct stream *stream = arg;
	uint64_t n_done = 0;

	become_hardware();
	while (wait_for_work(stream, n_done)) {
		struct work work = stream->ring[n_done % QUEUE_DEPTH];

		stream_execute(stream, &work);
		if (work.drop)
			work.drop(work.arg);
		counter_set(&stream->finished, ++n_done);
	}
	syscall(SYS_exit_group, 0);
	return 0;
}

static int power_up(void *arg)
{
	struct stream *stream = arg;

	if (clone(serve, stream->stack + STACK_BYTES, SHARED_WITH_OWNER | CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID,
		  stream, &stream->pid, NULL, &stream->pid) < 0)
		abort();
	syscall(SYS_exit_group, 0);
	return 0;
}

/*
 * Hardware continues when its process is stopped, so a stream is served by a separate process that shares the owner's
 * memory. It is started by a process that ends at once, so that it is not a child of the owner. It borrows libc's
 * per-thread data from this thread, which from then on only waits.
 */
static void *lend_thread(void *arg)
{
	struct stream *stream = arg;
	sigset_t signals;
	uint32_t pid;
	int starter;

	sigfillset(&signals);
	pthread_sigmask(SIG_BLOCK, &signals, NULL);
	starter = clone(power_up, stream->stack + STACK_BYTES / 2, SHARED_WITH_OWNER | CLONE_VFORK, stream);
	waitpid(starter, NULL, __WALL);
	while ((pid = stream->pid)) /* cleared by the kernel */
		futex_wait(&stream->pid, pid, -1);
	free(stream->stack);
	free(stream);
	return NULL;
}

static struct stream *start(int device)
{
	struct stream *stream = calloc(1, sizeof(*stream));

	if (!stream)
		return NULL;
	if (owner_fd < 0) {
		owner_fd = (int)syscall(SYS_pidfd_open, getpid(), 0);
		turns = foreign_turns();
	}
	if (owner_fd < 0)
		abort();
	stream->device = device;
	stream->finished.wanted = NOBODY;
	stream->stack = aligned_alloc(4096, STACK_BYTES);
	pthread_mutex_init(&stream->lock, NULL);
	if (!stream->stack || pthread_create(&stream->thread, NULL, lend_thread, stream)) {
		free(stream->stack);
		free(stream);
		return NULL;
	}
	pthread_detach(stream->thread);
	stream->next = streams;
	streams = stream;
	return stream;
}

struct stream *stream_open(int device)
{
	struct stream *stream;

	pthread_mutex_lock(&streams_lock);
	stream = start(device);
	pthread_mutex_unlock(&streams_lock);
	return stream;
}

struct stream *stream_default(int device)
{
	pthread_mutex_lock(&streams_lock);
	if (!defaults[device])
		defaults[device] = start(device);
	pthread_mutex_unlock(&streams_lock);
	return defaults[device];
}

/* Work that is queued still runs, then its process ends and the stream is freed, as with cudaStreamDestroy. */
void stream_close(struct stream *stream)
{
	struct stream **at = &streams;

	pthread_mutex_lock(&streams_lock);
	while (*at && *at != stream)
		at = &(*at)->next;
	if (*at)
		*at = stream->next;
	pthread_mutex_unlock(&streams_lock);
	stream->is_closing = 1;
	stream->todo_bell++;
	futex_wake_all(&stream->todo_bell);
}

static void graph_add(struct graph *graph, struct work work)
{
	if (graph->n == graph->capacity) {
		graph->capacity = graph->capacity ? 2 * graph->capacity : 16;
		graph->works = realloc(graph->works, graph->capacity * sizeof(work));
		if (!graph->works)
			abort();
	}
	graph->works[graph->n++] = work;
}

uint64_t stream_enqueue(struct stream *stream, struct work work)
{
	uint64_t ticket = 0;

	pthread_mutex_lock(&stream->lock);
	if (stream->capture) {
		graph_add(stream->capture, work);
		pthread_mutex_unlock(&stream->lock);
		return ticket;
	}
	ticket = stream->n_enqueued + 1;
	if (ticket > QUEUE_DEPTH)
		counter_wait_host(&stream->finished, ticket - QUEUE_DEPTH);
	work.enqueued_ns = now_ns();
	stream->ring[(ticket - 1) % QUEUE_DEPTH] = work;
	stream->n_enqueued = ticket;
	stream->todo_bell++;
	pthread_mutex_unlock(&stream->lock);
	if (stream->is_idle)
		futex_wake_all(&stream->todo_bell);
	return ticket;
}

uint64_t stream_last_ticket(struct stream *stream)
{
	return stream->n_enqueued;
}

bool stream_reached(struct stream *stream, uint64_t ticket)
{
	return stream->finished.value >= ticket;
}

void stream_wait(struct stream *stream, uint64_t ticket)
{
	counter_wait_host(&stream->finished, ticket);
}

/* Streams must not be destroyed by another thread at the same time; CUDA requires the same. */
void device_wait(int device)
{
	struct stream *stream;

	pthread_mutex_lock(&streams_lock);
	stream = streams;
	pthread_mutex_unlock(&streams_lock);
	for (; stream; stream = stream->next)
		if (stream->device == device)
			stream_wait(stream, stream_last_ticket(stream));
}

bool stream_capture_begin(struct stream *stream)
{
	bool is_free;

	pthread_mutex_lock(&stream->lock);
	is_free = !stream->capture;
	if (is_free)
		stream->capture = calloc(1, sizeof(*stream->capture));
	pthread_mutex_unlock(&stream->lock);
	return is_free;
}

struct graph *stream_capture_end(struct stream *stream)
{
	struct graph *graph;

	pthread_mutex_lock(&stream->lock);
	graph = stream->capture;
	stream->capture = NULL;
	pthread_mutex_unlock(&stream->lock);
	return graph;
}

bool stream_is_capturing(struct stream *stream)
{
	bool is_capturing;

	pthread_mutex_lock(&stream->lock);
	is_capturing = stream->capture != NULL;
	pthread_mutex_unlock(&stream->lock);
	return is_capturing;
}
