/*
 * CUDA copies and sets.
 *
 * A copy moves the first MOVED_BYTES for real; the rest is only timed. Copies from and to pageable memory pass through
 * a staging buffer and so block the caller; copies of pinned memory do not.
 */
#include <stdlib.h>
#include <string.h>

#include "cuda_types.h"
#include "device.h"
#include "memory.h"

#define MOVED_BYTES (1 << 20)
#define STAGING_BYTES (4 << 20)
#define ASYNC_STAGED_BYTES (64 << 10) /* smaller pageable host-to-device copies return once staged */
#define COPY_BYTES_PER_NS 12
#define ON_DEVICE_BYTES_PER_NS 1000
#define NS_PER_COPY 2000

struct copy {
	char *to;
	const char *from;
	size_t n_bytes;
	void *staged; /* freed after the copy */
};

static void move(struct stream *stream, void *arg, uint64_t n)
{
	struct copy *copy = arg;

	(void)stream;
	(void)n;
	memmove(copy->to, copy->from, copy->n_bytes < MOVED_BYTES ? copy->n_bytes : MOVED_BYTES);
}

static void drop_copy(void *arg)
{
	struct copy *copy = arg;

	free(copy->staged);
	free(copy);
}

static uint64_t enqueue_copy(cudaStream_t stream, struct copy what, int64_t busy_ns)
{
	struct copy *copy = malloc(sizeof(*copy));

	if (!copy)
		abort();
	*copy = what;
	return emulated_enqueue(emulated_device(), stream,
				(struct work){ .busy_ns = busy_ns, .run = move, .drop = drop_copy, .arg = copy });
}

/* The host's share of a pageable copy: its bytes pass through the staging buffer. */
static void stage(char *host, size_t n_bytes, bool is_read)
{
	static _Thread_local char *staging;

	if (!staging)
		staging = malloc(STAGING_BYTES);
	if (!staging)
		abort();
	for (size_t at = 0; at < n_bytes; at += STAGING_BYTES) {
		size_t n = n_bytes - at < STAGING_BYTES ? n_bytes - at : STAGING_BYTES;

		if (is_read)
			memcpy(staging, host + at, n);
		else if (at >= MOVED_BYTES)
			memcpy(host + at, staging, n);
	}
}

static void wait_for(cudaStream_t stream, uint64_t ticket)
{
	stream_wait(emulated_stream(stream), ticket);
}

static bool is_pageable(const void *address)
{
	return !memory_has(address, PINNED) && !memory_has(address, ON_DEVICE);
}

static int direction(void *dst, const void *src, int kind)
{
	bool to_device, from_device;

	if (kind != cudaMemcpyDefault)
		return kind;
	to_device = memory_has(dst, ON_DEVICE);
	from_device = memory_has(src, ON_DEVICE);
	if (to_device)
		return from_device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice;
	return from_device ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost;
}

static void copy_to_device(struct copy copy, bool is_blocking, cudaStream_t stream, int64_t busy_ns)
{
	if (!is_pageable(copy.from)) {
		uint64_t ticket = enqueue_copy(stream, copy, busy_ns);

		if (is_blocking)
			wait_for(stream, ticket);
		return;
	}
	if (copy.n_bytes <= ASYNC_STAGED_BYTES) {
		copy.staged = malloc(copy.n_bytes);
		memcpy(copy.staged, copy.from, copy.n_bytes);
		copy.from = copy.staged;
		enqueue_copy(stream, copy, busy_ns);
		return;
	}
	wait_for(stream, stream_last_ticket(emulated_stream(stream)));
	stage((char *)copy.from, copy.n_bytes, true);
	wait_for(stream, enqueue_copy(stream, copy, NS_PER_COPY));
}

static void copy_to_host(struct copy copy, bool is_blocking, cudaStream_t stream, int64_t busy_ns)
{
	bool is_staged = is_pageable(copy.to);
	uint64_t ticket = enqueue_copy(stream, copy, busy_ns);

	if (is_blocking || is_staged)
		wait_for(stream, ticket);
	if (is_staged)
		stage(copy.to, copy.n_bytes, false);
}

static cudaError_t copy_bytes(struct copy copy, int kind, bool is_blocking, cudaStream_t stream)
{
	int64_t busy_ns = NS_PER_COPY + (int64_t)copy.n_bytes / COPY_BYTES_PER_NS;

	if (!copy.n_bytes)
		return cudaSuccess;
	if (!copy.to || !copy.from || kind < 0 || kind > cudaMemcpyDefault)
		return cudaErrorInvalidValue;
	switch (direction(copy.to, copy.from, kind)) {
	case cudaMemcpyHostToDevice:
		copy_to_device(copy, is_blocking, stream, busy_ns);
		break;
	case cudaMemcpyDeviceToHost:
		copy_to_host(copy, is_blocking, stream, busy_ns);
		break;
	case cudaMemcpyDeviceToDevice:
		enqueue_copy(stream, copy, NS_PER_COPY + (int64_t)copy.n_bytes / ON_DEVICE_BYTES_PER_NS);
		break;
	default:
		wait_for(stream, enqueue_copy(stream, copy, 0));
	}
	return cudaSuccess;
}

API cudaError_t cudaMemcpy(void *dst, const void *src, size_t count, int kind)
{
	return emulated_result(copy_bytes((struct copy){ dst, src, count, NULL }, kind, true, NULL));
}

API cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t count, int kind, cudaStream_t stream)
{
	return emulated_result(copy_bytes((struct copy){ dst, src, count, NULL }, kind, false, stream));
}

/* Rows are moved as if they were contiguous: pitch is checked and not followed. */
API cudaError_t cudaMemcpy2D(void *dst, size_t dpitch, const void *src, size_t spitch, size_t width, size_t height,
			     int kind)
{
	if (width > dpitch || width > spitch)
		return emulated_result(cudaErrorInvalidValue);
	return emulated_result(copy_bytes((struct copy){ dst, src, width * height, NULL }, kind, true, NULL));
}

API cudaError_t cudaMemcpy2DAsync(void *dst, size_t dpitch, const void *src, size_t spitch, size_t width, size_t height,
				  int kind, cudaStream_t stream)
{
	if (width > dpitch || width > spitch)
		return emulated_result(cudaErrorInvalidValue);
	return emulated_result(copy_bytes((struct copy){ dst, src, width * height, NULL }, kind, false, stream));
}

struct fill {
	void *to;
	size_t n_bytes;
	int value;
};

static void fill(struct stream *stream, void *arg, uint64_t n)
{
	struct fill *fill = arg;

	(void)stream;
	(void)n;
	memset(fill->to, fill->value, fill->n_bytes < MOVED_BYTES ? fill->n_bytes : MOVED_BYTES);
}

API cudaError_t cudaMemsetAsync(void *devPtr, int value, size_t count, cudaStream_t stream)
{
	struct fill *what;

	if (!devPtr || !memory_has(devPtr, ON_DEVICE))
		return emulated_result(cudaErrorInvalidValue);
	what = malloc(sizeof(*what));
	if (!what)
		return emulated_result(cudaErrorMemoryAllocation);
	*what = (struct fill){ devPtr, count, value };
	emulated_enqueue(emulated_device(), stream,
			 (struct work){ .busy_ns = NS_PER_COPY + (int64_t)count / ON_DEVICE_BYTES_PER_NS,
					.run = fill, .drop = free, .arg = what });
	return cudaSuccess;
}

API cudaError_t cudaMemset(void *devPtr, int value, size_t count)
{
	return cudaMemsetAsync(devPtr, value, count, NULL);
}
