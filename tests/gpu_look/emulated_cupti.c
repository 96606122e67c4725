// SPDX-License-Identifier: Apache-2.0
/*
 * libcupti.so.12 of the tests: one subscriber, activity buffers of the client, records in the layout of
 * CUpti_ActivityKernel9 (cupti_activity.h of CUDA 12.4), and cuptiFinalize() that must be called from a CUDA call.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct kernel9 {
	uint32_t kind, caches[3];
	uint64_t start, end, completed;
	uint32_t device, context, stream;
	int32_t grid[3], block[3], shared[2];
	uint32_t local[2], correlation;
	int64_t grid_id;
	const char *name;
	char rest[112];
};
struct data { int site; };
typedef void (*Called)(void *, int, uint32_t, const struct data *);

extern void (*emulated_launch_hook)(const char *, uint64_t, uint64_t, uint32_t) __attribute__((weak));
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Called called;
static int domains, is_recording;
static void (*request)(uint8_t **, size_t *, size_t *);
static void (*complete)(void *, uint32_t, uint8_t *, size_t, size_t);
static uint8_t *buffer;
static size_t n_bytes, n_used, n_dropped;
static __thread int is_in_call;

static void flush(void)
{
	uint8_t *full = buffer;

	buffer = NULL;
	if (full)
		complete(NULL, 0, full, n_bytes, n_used);
	n_used = 0;
}

static void launched(const char *name, uint64_t start, uint64_t end, uint32_t stream)
{
	static const struct data exits = { 1 };
	struct kernel9 record = { .kind = 10, .start = start, .end = end, .stream = stream, .name = name };
	size_t n_records;
	Called now;

	pthread_mutex_lock(&lock);
	if (is_recording) {
		if (buffer && n_used + sizeof(record) > n_bytes)
			flush();
		if (!buffer)
			request(&buffer, &n_bytes, &n_records);
		if (buffer) {
			memcpy(buffer + n_used, &record, sizeof(record));
			n_used += sizeof(record);
		} else {
			n_dropped++;
		}
	}
	now = domains ? called : NULL;
	pthread_mutex_unlock(&lock);
	is_in_call = 1;
	if (now)
		now(NULL, 1, 307, &exits);
	is_in_call = 0;
}

int cuptiGetVersion(uint32_t *version) { *version = getenv("EMULATED_VERSION") ? (uint32_t)atoi(getenv("EMULATED_VERSION")) : 22; return 0; }
int cuptiGetResultString(int result, const char **text) { *text = result == 39 ? "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED" : "CUPTI_ERROR"; return 0; }
int cuptiSubscribe(void **subscriber, Called function, void *own)
{
	(void)own;
	if (called)
		return 39;
	called = function;
	*subscriber = &lock;
	if (&emulated_launch_hook)
		__atomic_store_n(&emulated_launch_hook, launched, __ATOMIC_RELEASE);
	return 0;
}
int cuptiUnsubscribe(void *subscriber) { (void)subscriber; called = NULL; return 0; }
int cuptiEnableDomain(uint32_t is_on, void *subscriber, int domain)
{
	(void)subscriber;
	pthread_mutex_lock(&lock);
	domains = is_on ? domains | domain : domains & ~domain;
	pthread_mutex_unlock(&lock);
	return 0;
}
int cuptiActivityRegisterCallbacks(void *ask, void *done) { request = ask; complete = done; return 0; }
int cuptiActivityEnable(int kind) { is_recording = kind == 10; return kind == 10 ? 0 : 1; }
int cuptiActivityDisable(int kind) { (void)kind; pthread_mutex_lock(&lock); is_recording = 0; pthread_mutex_unlock(&lock); return 0; }
int cuptiActivityFlushAll(uint32_t forced) { (void)forced; pthread_mutex_lock(&lock); flush(); pthread_mutex_unlock(&lock); return 0; }
int cuptiActivityGetNextRecord(uint8_t *from, size_t valid, struct kernel9 **record)
{
	struct kernel9 *next = *record ? *record + 1 : (struct kernel9 *)from;

	if ((uint8_t *)(next + 1) > from + valid)
		return 12; /* CUPTI_ERROR_MAX_LIMIT_REACHED */
	*record = next;
	return 0;
}
int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *n) { (void)context; (void)stream; *n = n_dropped; n_dropped = 0; return 0; }
int cuptiGetTimestamp(uint64_t *ns)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	*ns = (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
	return 0;
}
int cuptiFinalize(void)
{
	if (!is_in_call)
		abort();
	pthread_mutex_lock(&lock);
	called = NULL;
	domains = 0;
	__atomic_store_n(&emulated_launch_hook, NULL, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&lock);
	return 0;
}
