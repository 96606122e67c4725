/*
 * CUDA memory: allocating and freeing.
 *
 * Device memory is address space that is backed only where it is touched, so 80 GiB fit anywhere. Allocating
 * and freeing take time in the caller by size, and a free waits for the device first.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "clock.h"
#include "cuda_types.h"
#include "device.h"
#include "memory.h"

#define CAPACITY_BYTES (80LL << 30)
#define SMALL_BYTES (2 << 20) /* below this size, an allocation comes from an existing block */
#define CPU_NS_PER_MIB 600 /* with the next: 512 MiB take 0.8 ms, as on an H100 */
#define FIRMWARE_NS_PER_MIB 1000
#define NS_PER_SMALL_ALLOC 3000

struct block {
	struct block *next;
	char *start;
	size_t n_bytes;
	int device;
	enum memory kind;
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

static cudaError_t add_block(char *start, size_t n_bytes, enum memory kind, bool is_ours)
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

static struct block *take_block(char *start, enum memory kind)
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

bool memory_has(const void *address, enum memory kind)
{
	const char *at = address;
	bool is_found = false;

	pthread_mutex_lock(&blocks_lock);
	for (struct block *block = blocks; block && !is_found; block = block->next)
		is_found = block->kind == kind && at >= block->start && at < block->start + block->n_bytes;
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

/* The driver fills page tables, and waits for the device's firmware to accept them. */
static void pay_for(size_t n_bytes)
{
	int64_t n_mib = (int64_t)(n_bytes >> 20);

	if (n_bytes < SMALL_BYTES) {
		spend_cpu(NS_PER_SMALL_ALLOC);
		return;
	}
	spend_cpu(n_mib * CPU_NS_PER_MIB);
	sleep_until(now_ns() + n_mib * FIRMWARE_NS_PER_MIB);
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

/* Stream-ordered: the memory is available at once, from the pool. */
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
