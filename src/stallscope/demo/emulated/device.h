/*
 * The emulated device: streams and their work. Private to the emulated libraries.
 *
 * A stream is a bounded first-in first-out queue and a task that plays the hardware: it takes CPU only to start and
 * end work, sleeps in between, and continues when its owner is stopped. Host threads enqueue and continue; they block
 * when the queue is full, and where they ask to wait. Streams run concurrently (as if all were created non-blocking,
 * including the default stream). The purpose of the work is unknown here.
 */
#ifndef EMULATED_DEVICE_H
#define EMULATED_DEVICE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))
#define QUEUE_DEPTH 1024
#define MAX_DEVICES 64

struct stream;

/* A number that only grows, and the threads that wait for it. */
struct counter {
	_Atomic uint64_t value;
	_Atomic uint64_t wanted; /* smallest value that a thread sleeps for; UINT64_MAX: none */
	_Atomic uint32_t bell;
};

struct work {
	int64_t busy_ns;                                            /* the device is busy for this long, then: */
	void (*run)(struct stream *stream, void *arg, uint64_t n);  /* may block the stream; NULL: nothing */
	void (*drop)(void *arg);                                    /* releases arg; NULL: nothing to release */
	void *arg;
	uint64_t n;
	int64_t enqueued_ns;
};

/* How a host thread waits, as cudaDeviceSchedule*: 0 spin briefly, then block; 1 spin; 2 yield; 4 block. */
extern _Atomic uint32_t schedule_flags;

void counter_set(struct counter *counter, uint64_t value);
void counter_wait_host(struct counter *counter, uint64_t value);
void counter_wait_device(struct counter *counter, uint64_t value);

struct stream *stream_open(int device);
void stream_close(struct stream *stream);
struct stream *stream_default(int device);
uint64_t stream_enqueue(struct stream *stream, struct work work); /* returns its ticket */
uint64_t stream_last_ticket(struct stream *stream);
bool stream_reached(struct stream *stream, uint64_t ticket);
void stream_wait(struct stream *stream, uint64_t ticket);
void stream_execute(struct stream *stream, const struct work *work);
void device_wait(int device);

/* Capture: enqueued work goes into the graph instead. */
struct graph {
	uint32_t n, capacity;
	struct work *works;
};
bool stream_capture_begin(struct stream *stream);
struct graph *stream_capture_end(struct stream *stream);
bool stream_is_capturing(struct stream *stream);

/* For libnccl: a handle as the caller gave it (NULL: the default stream of `device`). */
API uint64_t emulated_enqueue(int device, void *stream, struct work work);
API bool emulated_is_capturing(int device, void *stream);
API int emulated_device(void);
API void emulated_set_device(int device);
/* To be called from time to time by each waiter on the device's side. */
API void emulated_end_with_owner(void);

#endif
