/*
 * CUDA memory: allocations, copies, sets.
 *
 * Device memory is address space that is backed only where it is touched, so 80 GiB fit anywhere. Allocating
 * and freeing cost CPU in the caller by size (page tables), and a free waits for the device first. A copy
 * moves the first MOVED_BYTES for real; the rest is only timed. Copies from and to pageable memory go
 * through a staging buffer and so block the caller; those of pinned memory do not.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "clock.h"
#include "cuda_types.h"
#include "device.h"

#define CAPACITY_BYTES (80LL << 30)
#define MOVED_BYTES (1 << 20)
#define STAGING_BYTES (4 << 20)
#define ASYNC_STAGED_BYTES (64 << 10) /* smaller pageable host-to-device copies return once staged */
#define SMALL_BYTES (2 << 20)         /* below, an allocation comes out of a block that is there */
#define NS_PER_MIB_ALLOC 16000
#define NS_PER_SMALL_ALLOC 3000
#define COPY_BYTES_PER_NS 12
#define ON_DEVICE_BYTES_PER_NS 1000
#define NS_PER_COPY 2000

enum { ON_DEVICE, PINNED };

struct block {
	struct block *next;
	char *start;
	size_t n_bytes;
	int device, kind;
	bool is_ours; /* false: registered, the caller's own memory */
};

static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks;
static long long used_bytes[MAX_DEVICES];

static void *map_memory(size_t n_bytes, int flags)
{
	void *start = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);

	return start == MAP_FAILED ? NULL : start;
}

static cudaError_t add_block(char *start, size_t n_bytes, int kind, bool is_ours)
{
	struct block *block = malloc(sizeof(*block));
	int device = emulated_device();

	if (!block)
		return cudaErrorMemoryAllocation;
	*block = (struct block){ .start = start, .n_bytes = n_bytes, .device = device, .kind = kind, .is_ours = is_ours };
	pthread_mutex_lock(&blocks_lock);
	block->next = blocks;
	blocks = block;
	pthread_mutex_unlock(&blocks_lock);
	return cudaSuccess;
}

static struct block *take_block(char *start, int kind)
{
	struct block **at, *found;

	pthread_mutex_lock(&blocks_lock);
	for (at = &blocks; *at; at = &(*at)->next)
		if ((*at)->start == start && (*at)->kind == kind)
			break;
	found = *at;
	if (found)
		*at = found->next;
	pthread_mutex_unlock(&blocks_lock);
	return found;
}

static bool lies_in(const char *address, int kind)
{
	bool is_found = false;

	pthread_mutex_lock(&blocks_lock);
	for (struct block *block = blocks; block && !is_found; block = block->next)
		is_found = block->kind == kind && address >= block->start && address < block->start + block->n_bytes;
	pthread_mutex_unlock(&blocks_lock);
	return is_found;
}

static bool reserve(int device, size_t n_bytes)
{
	bool fits;

	pthread_mutex_lock(&blocks_lock);
	fits = n_bytes <= (size_t)(CAPACITY_BYTES - used_bytes[device]);
	if (fits)
		used_bytes[device] += n_bytes;
	pthread_mutex_unlock(&blocks_lock);
	return fits;
}

static void give_back(int device, size_t n_bytes)
{
	pthread_mutex_lock(&blocks_lock);
	used_bytes[device] -= n_bytes;
	pthread_mutex_unlock(&blocks_lock);
}

static void pay_for(size_t n_bytes)
{
	spend_cpu(n_bytes < SMALL_BYTES ? NS_PER_SMALL_ALLOC : (int64_t)(n_bytes >> 20) * NS_PER_MIB_ALLOC);
}

static cudaError_t allocate(void **pointer, size_t n_bytes)
{
	if (!pointer)
		return cudaErrorInvalidValue;
	*pointer = NULL;
	if (!n_bytes)
		return cudaSuccess;
	if (!reserve(emulated_device(), n_bytes))
		return cudaErrorMemoryAllocation;
	*pointer = map_memory(n_bytes, MAP_NORESERVE);
	if (*pointer && add_block(*pointer, n_bytes, ON_DEVICE, true) == cudaSuccess)
		return cudaSuccess;
	give_back(emulated_device(), n_bytes);
	return cudaErrorMemoryAllocation;
}

API cudaError_t cudaMalloc(void **devPtr, size_t size)
{
	cudaError_t result = allocate(devPtr, size);

	if (result == cudaSuccess && size)
		pay_for(size);
	return emulated_result(result);
}

API cudaError_t cudaFree(void *devPtr)
{
	struct block *block;

	if (!devPtr)
		return cudaSuccess;
	block = take_block(devPtr, ON_DEVICE);
	if (!block)
		return emulated_result(cudaErrorInvalidValue);
	device_wait(block->device);
	pay_for(block->n_bytes);
	munmap(block->start, block->n_bytes);
	give_back(block->device, block->n_bytes);
	free(block);
	return cudaSuccess;
}

/* Stream-ordered: the memory is there at once, out of the pool. */
API cudaError_t cudaMallocAsync(void **devPtr, size_t size, cudaStream_t stream)
{
	(void)stream;
	return emulated_result(allocate(devPtr, size));
}

static void release_block(struct stream *stream, void *arg, uint64_t n)
{
	struct block *block = arg;

	(void)stream;
	(void)n;
	munmap(block->start, block->n_bytes);
	give_back(block->device, block->n_bytes);
	free(block);
}

API cudaError_t cudaFreeAsync(void *devPtr, cudaStream_t stream)
{
	struct block *block = take_block(devPtr, ON_DEVICE);

	if (!block)
		return emulated_result(cudaErrorInvalidValue);
	emulated_enqueue(block->device, stream, (struct work){ .run = release_block, .arg = block });
	return cudaSuccess;
}

API cudaError_t cudaHostAlloc(void **pHost, size_t size, unsigned int flags)
{
	(void)flags;
	if (!pHost || !size)
		return emulated_result(cudaErrorInvalidValue);
	*pHost = map_memory(size, MAP_POPULATE);
	if (!*pHost)
		return emulated_result(cudaErrorMemoryAllocation);
	return emulated_result(add_block(*pHost, size, PINNED, true));
}

API cudaError_t cudaMallocHost(void **ptr, size_t size)
{
	return cudaHostAlloc(ptr, size, 0);
}

API cudaError_t cudaFreeHost(void *ptr)
{
	struct block *block;

	if (!ptr)
		return cudaSuccess;
	block = take_block(ptr, PINNED);
	if (!block || !block->is_ours)
		return emulated_result(cudaErrorInvalidValue);
	device_wait(block->device);
	munmap(block->start, block->n_bytes);
	free(block);
	return cudaSuccess;
}

API cudaError_t cudaHostRegister(void *ptr, size_t size, unsigned int flags)
{
	(void)flags;
	if (!ptr || !size)
		return emulated_result(cudaErrorInvalidValue);
	return emulated_result(add_block(ptr, size, PINNED, false));
}

API cudaError_t cudaHostUnregister(void *ptr)
{
	struct block *block = take_block(ptr, PINNED);

	if (!block)
		return emulated_result(cudaErrorInvalidValue);
	free(block);
	return cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
	if (!free_bytes || !total_bytes)
		return emulated_result(cudaErrorInvalidValue);
	pthread_mutex_lock(&blocks_lock);
	*free_bytes = CAPACITY_BYTES - used_bytes[emulated_device()];
	pthread_mutex_unlock(&blocks_lock);
	*total_bytes = CAPACITY_BYTES;
	return cudaSuccess;
}

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
	return !lies_in(address, PINNED) && !lies_in(address, ON_DEVICE);
}

static int direction(void *dst, const void *src, int kind)
{
	bool to_device, from_device;

	if (kind != cudaMemcpyDefault)
		return kind;
	to_device = lies_in(dst, ON_DEVICE);
	from_device = lies_in(src, ON_DEVICE);
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

/* Rows are moved as if they lay one behind the other: pitch is checked and not followed. */
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

	if (!devPtr || !lies_in(devPtr, ON_DEVICE))
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
