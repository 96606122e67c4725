// SPDX-License-Identifier: Apache-2.0
/*
 * Records all kernels of a running process for some seconds. `stallscope look` loads this library into the process and
 * calls stallscope_look(), which returns at once: a thread of its own does the rest.
 *
 * CUPTI has one subscriber. This library subscribes before it records, so another profiler of the process is never
 * disturbed: the subscription fails, and nothing else happens. At the end CUPTI is detached from within a CUDA call of
 * the job, as its documentation asks for. The library itself stays loaded, without a thread, for the next window.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "cupti_abi.h"
#include "look.h"

#define POLL_NS 10000000
#define DETACH_NS 2000000000ull
#define BUFFER_BYTES (1 << 20)
#define STACK_BYTES (1 << 20) /* the C library places the static TLS of the job's libraries on each thread's stack */
#define N_SLOTS (4 * N_NAMES)

static struct cupti cupti;
static struct look_memory *memory;
static atomic_int is_running, is_detaching;
static void *subscriber;
static char library[4096];
static uint64_t window_ns;

static pthread_mutex_t recording = PTHREAD_MUTEX_INITIALIZER; /* of buffers that complete in several threads */
static struct {
	const char *name;
	uint32_t number;
} slots[N_SLOTS];

static uint64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static uint64_t wall_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_REALTIME, &t);
	return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static void pause_shortly(void)
{
	const struct timespec pause = { 0, POLL_NS };

	nanosleep(&pause, NULL);
}

/* The number of a name. CUPTI keeps one string for each kernel, so its address identifies it. The last number: no room. */
static uint32_t number_of(const char *name)
{
	uintptr_t hash = (uintptr_t)name * 0x9e3779b97f4a7c15ull >> 32;

	for (int i = 0; i < N_SLOTS; i++) {
		uint32_t at = (uint32_t)(hash + (uintptr_t)i) % N_SLOTS, number;

		if (slots[at].name == name)
			return slots[at].number;
		if (slots[at].name)
			continue;
		number = atomic_load(&memory->n_names);
		if (number >= N_NAMES - 1)
			break;
		strncpy(memory->names[number], name, NAME_BYTES - 1);
		slots[at].name = name;
		slots[at].number = number;
		atomic_store(&memory->n_names, number + 1);
		return number;
	}
	return N_NAMES - 1;
}

static void keep(const struct kernel_activity *kernel)
{
	uint64_t at = atomic_load(&memory->n_kernels);

	if (at < N_KERNELS)
		memory->kernels[at] = (struct look_kernel){
			.start_ns = kernel->start_ns,
			.end_ns = kernel->end_ns,
			.name = number_of(kernel->name ? kernel->name : ""),
			.stream = kernel->stream,
			.device = kernel->device,
		};
	atomic_store(&memory->n_kernels, at + 1);
}

static void give_buffer(uint8_t **buffer, size_t *n_bytes, size_t *n_records)
{
	*buffer = aligned_alloc(8, BUFFER_BYTES);
	*n_bytes = *buffer ? BUFFER_BYTES : 0;
	*n_records = 0;
}

static void take_buffer(void *context, uint32_t stream, uint8_t *buffer, size_t n_bytes, size_t n_valid)
{
	struct kernel_activity *record = NULL;
	size_t n_lost = 0;

	(void)n_bytes;
	pthread_mutex_lock(&recording);
	while (memory && n_valid && !cupti.next_record(buffer, n_valid, &record))
		if (record->kind == KIND_CONCURRENT_KERNEL && record->end_ns)
			keep(record);
	if (memory && !cupti.dropped(context, stream, &n_lost))
		atomic_fetch_add(&memory->n_lost, n_lost);
	pthread_mutex_unlock(&recording);
	free(buffer);
}

/* No callback is enabled until the end of the window. Then the first CUDA call that returns detaches CUPTI. */
static void called(void *own, int domain, uint32_t which, const struct callback_data *data)
{
	(void)own;
	(void)domain;
	(void)which;
	if (data->site != SITE_EXIT || !atomic_exchange(&is_detaching, 0))
		return;
	cupti.finalize();
	atomic_store(&memory->is_detached, 1);
}

static int fail(int at, cupti_result error, const char *text)
{
	if (!text && cupti.result_text)
		cupti.result_text(error, &text);
	strncpy(memory->error_text, text ? text : "", ERROR_BYTES - 1);
	memory->error = error;
	atomic_store(&memory->failed_at, (uint32_t)at);
	return -1;
}

static int load(void)
{
	void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
	void **functions = (void **)&cupti;

	if (!handle)
		return fail(AT_LIBRARY, 0, dlerror());
	for (size_t i = 0; i < sizeof(cupti_names) / sizeof(cupti_names[0]); i++)
		if (!(functions[i] = dlsym(handle, cupti_names[i])))
			return fail(AT_LIBRARY, 0, dlerror());
	if (cupti.version(&memory->cupti_version) || memory->cupti_version < MIN_VERSION || memory->cupti_version > MAX_VERSION)
		return fail(AT_VERSION, 0, "unknown version of CUPTI");
	return 0;
}

static int begin(void)
{
	cupti_result error = cupti.subscribe(&subscriber, called, NULL);

	if (error)
		return fail(AT_SUBSCRIBER, error, NULL);
	error = cupti.register_buffers(give_buffer, take_buffer);
	if (!error)
		error = cupti.enable(KIND_CONCURRENT_KERNEL);
	if (!error)
		error = cupti.timestamp(&memory->begin_ns);
	memory->begin_wall_ns = wall_ns();
	if (!error)
		return 0;
	cupti.unsubscribe(subscriber);
	return fail(AT_ENABLE, error, NULL);
}

/* A job that makes no CUDA call for some seconds keeps CUPTI, without a subscriber and without activities. */
static void detach(void)
{
	uint64_t until_ns = now_ns() + DETACH_NS;

	atomic_store(&is_detaching, 1);
	cupti.enable_domain(1, subscriber, DOMAIN_DRIVER);
	cupti.enable_domain(1, subscriber, DOMAIN_RUNTIME);
	while (now_ns() < until_ns && !atomic_load(&memory->is_detached))
		pause_shortly();
	if (atomic_exchange(&is_detaching, 0)) {
		cupti.enable_domain(0, subscriber, DOMAIN_DRIVER);
		cupti.enable_domain(0, subscriber, DOMAIN_RUNTIME);
		cupti.unsubscribe(subscriber);
		return;
	}
	while (!atomic_load(&memory->is_detached)) /* a thread of the job is inside cuptiFinalize() */
		pause_shortly();
}

static void *record(void *unused)
{
	struct look_memory *own = memory;
	uint64_t until_ns;

	(void)unused;
	if (load() || begin()) {
		atomic_store(&own->state, FAILED);
	} else {
		atomic_store(&own->state, RECORDING);
		until_ns = now_ns() + window_ns;
		while (now_ns() < until_ns && !atomic_load(&own->is_cancelled))
			pause_shortly();
		cupti.timestamp(&own->end_ns);
		cupti.flush(0);
		cupti.disable(KIND_CONCURRENT_KERNEL);
		cupti.flush(1);
		detach();
		atomic_store(&own->state, DONE);
	}
	pthread_mutex_lock(&recording);
	memory = NULL;
	memset(slots, 0, sizeof(slots));
	pthread_mutex_unlock(&recording);
	munmap(own, sizeof(*own));
	atomic_store(&is_running, 0);
	return NULL;
}

static int start_thread(void)
{
	pthread_t thread;
	pthread_attr_t attributes;
	size_t default_bytes;
	sigset_t all, before;
	int error;

	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	pthread_attr_getstacksize(&attributes, &default_bytes);
	pthread_attr_setstacksize(&attributes, STACK_BYTES);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); /* signals of the job stay with its own threads */
	error = pthread_create(&thread, &attributes, record, NULL);
	if (error && !pthread_attr_setstacksize(&attributes, default_bytes))
		error = pthread_create(&thread, &attributes, record, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (!error)
		pthread_setname_np(thread, LOOK_NAME);
	pthread_attr_destroy(&attributes);
	return error;
}

static int open_memory(void)
{
	int fd = memfd_create(LOOK_NAME, MFD_CLOEXEC);
	struct look_memory *made = MAP_FAILED;

	if (fd < 0)
		return -errno;
	if (!ftruncate(fd, sizeof(*made)))
		made = mmap(NULL, sizeof(*made), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (made == MAP_FAILED) {
		int error = -errno;

		close(fd);
		return error;
	}
	made->version = 1;
	made->pid = (uint32_t)getpid();
	made->magic = LOOK_MAGIC;
	memory = made;
	return fd;
}

/* Record for some time. Returns the descriptor of the memory, which the caller closes, or -errno. */
__attribute__((visibility("default"))) int stallscope_look(const char *cupti_path, unsigned milliseconds)
{
	int fd, error;

	if (atomic_exchange(&is_running, 1))
		return -EBUSY;
	strncpy(library, cupti_path, sizeof(library) - 1);
	window_ns = milliseconds * 1000000ull;
	fd = open_memory();
	if (fd < 0) {
		atomic_store(&is_running, 0);
		return fd;
	}
	error = start_thread();
	if (!error)
		return fd;
	munmap(memory, sizeof(*memory));
	memory = NULL;
	close(fd);
	atomic_store(&is_running, 0);
	return -error;
}
