/* Functions with the names and signatures of CUDA's that succeed at once: memory at invented addresses, no work.
 * Arguments are ignored. Every function that can fail returns `fail_with`. */
#include <stddef.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default"), noinline, optimize("O0")))

typedef struct {
	unsigned x, y, z;
} dim3;

typedef struct {
	size_t width, height, depth;
} cudaExtent;

typedef struct {
	void *ptr;
	size_t pitch, xsize, ysize;
} cudaPitchedPtr;

static uintptr_t next_address = 0x7f0000000000;
int fail_with;
long sleep_us;
int blocked_by = -1; /* a file descriptor: the next call returns when a byte can be read */

static int done(void)
{
	char byte;

	if (blocked_by >= 0 && read(blocked_by, &byte, 1))
		blocked_by = -1;
	struct timespec t = {sleep_us / 1000000, sleep_us % 1000000 * 1000};

	if (sleep_us)
		nanosleep(&t, NULL);
	return fail_with;
}

static int made(void **out)
{
	*out = (void *)next_address;
	next_address += 1 << 24;
	return done();
}

API void set_failure(int result)
{
	fail_with = result;
}

API void set_sleep(long us)
{
	sleep_us = us;
}

#define MAKES(name, ...)                    \
	API int name(void **out, ##__VA_ARGS__) \
	{                                   \
		return made(out);           \
	}
#define DOES(name, ...)           \
	API int name(__VA_ARGS__) \
	{                         \
		return done();    \
	}

DOES(cudaSetDevice, int device)
DOES(cuInit, unsigned flags)
API int cudaMalloc(void **out, size_t n)
{
	return n >> 48 ? 2 : made(out);
}
MAKES(cudaMallocManaged, size_t n, unsigned flags)
MAKES(cudaHostAlloc, size_t n, unsigned flags)
MAKES(cudaMallocAsync, size_t n, void *stream)
MAKES(cudaMallocFromPoolAsync, size_t n, void *pool, void *stream)
MAKES(cuMemCreate, size_t n, const void *properties, unsigned long long flags)
DOES(cudaHostRegister, void *p, size_t n, unsigned flags)
DOES(cudaFree, void *p)
DOES(cudaFreeAsync, void *p, void *stream)
DOES(cudaFreeHost, void *p)
DOES(cudaHostUnregister, void *p)
DOES(cuMemRelease, unsigned long long handle)
API int cuMemRetainAllocationHandle(unsigned long long *handle, void *address)
{
	*handle = (uintptr_t)address; /* as if it were mapped at the address of its number */
	return done();
}

API int cudaMallocPitch(void **out, size_t *pitch, size_t width, size_t height)
{
	*pitch = (width + 511) / 512 * 512;
	return made(out);
}

API int cudaMalloc3D(cudaPitchedPtr *out, cudaExtent extent)
{
	out->pitch = (extent.width + 511) / 512 * 512;
	return made(&out->ptr);
}

DOES(cuMemcpyHtoDAsync_v2, unsigned long long to, const void *from, size_t n, void *stream)
API int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *stream)
{
	return kind == 1 ? cuMemcpyHtoDAsync_v2((uintptr_t)to, from, n, stream) : done();
}
DOES(cudaMemcpy, void *to, const void *from, size_t n, int kind)
DOES(cudaMemcpyPeer, void *to, int to_device, const void *from, int from_device, size_t n)
DOES(cudaMemcpy2D, void *to, size_t p, const void *from, size_t q, size_t width, size_t height, int kind)
DOES(cudaMemcpy2DAsync, void *to, size_t p, const void *from, size_t q, size_t w, size_t h, int kind, void *stream)
DOES(cudaMemcpy3D, const void *parameters)
DOES(cuMemcpy2D_v2, const void *parameters)
DOES(cuMemcpy3D_v2, const void *parameters)
DOES(cudaMemset, void *p, int value, size_t n)
DOES(cudaMemsetAsync, void *p, int value, size_t n, void *stream)
DOES(cuMemsetD32Async, unsigned long long p, unsigned value, size_t n, void *stream)
DOES(cuLaunchKernel, void *f, unsigned a, unsigned b, unsigned c, unsigned x, unsigned y, unsigned z, unsigned shared,
     void *stream, void **parameters, void **extra)
API int cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream)
{
	return cuLaunchKernel((void *)f, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared, stream, arguments, NULL);
}
DOES(cudaLaunchKernelExC, const void *config, const void *f, void **arguments)
MAKES(cudaEventCreate)
DOES(cudaEventRecord, void *event, void *stream)
DOES(cudaEventSynchronize, void *event)
DOES(cudaStreamWaitEvent, void *stream, void *event, unsigned flags)
MAKES(cudaStreamCreateWithFlags, unsigned flags)
DOES(cudaDeviceSynchronize, void)
DOES(cuStreamSynchronize, void *stream)

API int cudaStreamSynchronize(void *stream)
{
	return cuStreamSynchronize(stream);
}
DOES(cudaStreamBeginCapture, void *stream, int mode)
API int cudaStreamEndCapture(void *stream, void **graph)
{
	return made(graph);
}
MAKES(cudaGraphInstantiate, void *graph, unsigned long long flags)
DOES(cudaGraphExecUpdate, void *executable, void *graph, void *result)
DOES(cudaGraphExecDestroy, void *executable)
DOES(cudaGraphDestroy, void *graph)
DOES(cudaGraphLaunch, void *executable, void *stream)
MAKES(cuModuleLoadData, const void *image)

/* Launches n times as fast as it goes, in the way of a busy job. */
API void waits(long n)
{
	while (n--)
		cudaStreamSynchronize(0);
}

API void storm(long n)
{
	dim3 one = {1, 1, 1};

	for (long i = 0; i < n; i++)
		cudaLaunchKernel(&next_address, one, one, NULL, 0, NULL);
}
