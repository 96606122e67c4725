/*
 * CUDA events. A record is work in a stream; waiting is for the last record made before.
 *
 * An event lives until it is destroyed and no queued work refers to it.
 */
#include <stdlib.h>

#include "clock.h"
#include "cuda_types.h"
#include "device.h"

struct event {
	_Atomic uint32_t refs;
	_Atomic uint64_t n_recorded;
	_Atomic int64_t at_ns;
	struct counter done;
};

static struct event *event_open(void)
{
	struct event *event = calloc(1, sizeof(*event));

	if (event) {
		event->refs = 1;
		event->done.wanted = UINT64_MAX;
	}
	return event;
}

static void event_release(struct event *event)
{
	if (--event->refs == 0)
		free(event);
}

static void release_arg(void *arg)
{
	event_release(arg);
}

static void mark(struct stream *stream, void *arg, uint64_t n)
{
	struct event *event = arg;

	(void)stream;
	event->at_ns = now_ns();
	if (n > event->done.value) /* a graph records the same n each time it runs */
		counter_set(&event->done, n);
}

static void wait_marked(struct stream *stream, void *arg, uint64_t n)
{
	struct event *event = arg;

	(void)stream;
	counter_wait_device(&event->done, n);
}

static void event_record(struct event *event, struct stream *stream)
{
	event->refs++;
	stream_enqueue(stream, (struct work){ .run = mark, .drop = release_arg, .arg = event, .n = ++event->n_recorded });
}

static void stream_wait_event(struct stream *stream, struct event *event)
{
	if (!event->n_recorded)
		return;
	event->refs++;
	stream_enqueue(stream,
		       (struct work){ .run = wait_marked, .drop = release_arg, .arg = event, .n = event->n_recorded });
}

API cudaError_t cudaEventCreateWithFlags(struct event **event, unsigned int flags)
{
	(void)flags;
	if (!event)
		return emulated_result(cudaErrorInvalidValue);
	*event = event_open();
	return emulated_result(*event ? cudaSuccess : cudaErrorMemoryAllocation);
}

API cudaError_t cudaEventCreate(struct event **event)
{
	return cudaEventCreateWithFlags(event, 0);
}

API cudaError_t cudaEventDestroy(struct event *event)
{
	if (!event)
		return emulated_result(cudaErrorInvalidResourceHandle);
	event_release(event);
	return cudaSuccess;
}

API cudaError_t cudaEventRecord(struct event *event, cudaStream_t stream)
{
	if (!event)
		return emulated_result(cudaErrorInvalidResourceHandle);
	event_record(event, emulated_stream(stream));
	return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(struct event *event, cudaStream_t stream, unsigned int flags)
{
	(void)flags;
	return cudaEventRecord(event, stream);
}

API cudaError_t cudaEventSynchronize(struct event *event)
{
	if (!event)
		return emulated_result(cudaErrorInvalidResourceHandle);
	counter_wait_host(&event->done, event->n_recorded);
	return cudaSuccess;
}

API cudaError_t cudaEventQuery(struct event *event)
{
	if (!event)
		return emulated_result(cudaErrorInvalidResourceHandle);
	return event->done.value >= event->n_recorded ? cudaSuccess : cudaErrorNotReady;
}

API cudaError_t cudaEventElapsedTime(float *ms, struct event *start, struct event *end)
{
	if (!ms || !start || !end || !start->n_recorded || !end->n_recorded)
		return emulated_result(cudaErrorInvalidResourceHandle);
	if (start->done.value < start->n_recorded || end->done.value < end->n_recorded)
		return cudaErrorNotReady;
	*ms = (float)(end->at_ns - start->at_ns) / 1e6f;
	return cudaSuccess;
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, struct event *event, unsigned int flags)
{
	(void)flags;
	if (!event)
		return emulated_result(cudaErrorInvalidResourceHandle);
	stream_wait_event(emulated_stream(stream), event);
	return cudaSuccess;
}
