/*
 * libcudart.so.12, emulated: devices, streams, launches. Memory, copies, events and graphs have their own files.
 *
 * Names and calling conventions are the same as in the CUDA 12 runtime, so that every observer of the real library can
 * observe this library. There is a single kernel, emulated_timed_kernel: its only argument is its duration.
 */
#include <stdlib.h>

#include "clock.h"
#include "cuda_types.h"
#include "device.h"

#define N_DEVICES_DEFAULT 8
#define NS_PER_KERNEL_START 1500

typedef struct {
	unsigned int x, y, z;
} dim3;

typedef struct {
	dim3 gridDim, blockDim;
	size_t dynamicSmemBytes;
	cudaStream_t stream;
	void *attrs;
	unsigned int numAttrs;
} cudaLaunchConfig_t;

static _Thread_local int current_device;
static _Thread_local cudaError_t last_error;

__attribute__((constructor)) static void read_schedule(void)
{
	const char *how = getenv("EMULATED_CUDA_SCHEDULE");

	if (how)
		schedule_flags = (uint32_t)atoi(how);
}

static int n_devices(void)
{
	const char *n = getenv("EMULATED_CUDA_DEVICES");
	int n_devices = n ? atoi(n) : N_DEVICES_DEFAULT;

	return n_devices < 0 ? 0 : n_devices > MAX_DEVICES ? MAX_DEVICES : n_devices;
}

cudaError_t emulated_result(cudaError_t error)
{
	if (error)
		last_error = error;
	return error;
}

static struct stream *stream_of(int device, cudaStream_t handle)
{
	return (uintptr_t)handle <= 2 ? stream_default(device) : handle;
}

struct stream *emulated_stream(cudaStream_t handle)
{
	return stream_of(current_device, handle);
}

uint64_t emulated_enqueue(int device, void *stream, struct work work)
{
	return stream_enqueue(stream_of(device, stream), work);
}

bool emulated_is_capturing(int device, void *stream)
{
	return stream_is_capturing(stream_of(device, stream));
}

int emulated_device(void)
{
	return current_device;
}

void emulated_set_device(int device)
{
	current_device = device;
}

API cudaError_t cudaGetDeviceCount(int *count)
{
	if (!count)
		return emulated_result(cudaErrorInvalidValue);
	*count = n_devices();
	return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device)
{
	if (device < 0 || device >= n_devices())
		return emulated_result(cudaErrorInvalidDevice);
	current_device = device;
	return cudaSuccess;
}

API cudaError_t cudaGetDevice(int *device)
{
	if (!device)
		return emulated_result(cudaErrorInvalidValue);
	*device = current_device;
	return cudaSuccess;
}

API cudaError_t cudaSetDeviceFlags(unsigned int flags)
{
	schedule_flags = flags & 7;
	return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int *version)
{
	if (!version)
		return emulated_result(cudaErrorInvalidValue);
	*version = 12080;
	return cudaSuccess;
}

API cudaError_t cudaDriverGetVersion(int *version)
{
	return cudaRuntimeGetVersion(version);
}

API cudaError_t cudaGetLastError(void)
{
	cudaError_t error = last_error;

	last_error = cudaSuccess;
	return error;
}

API cudaError_t cudaPeekAtLastError(void)
{
	return last_error;
}

API const char *cudaGetErrorString(cudaError_t error)
{
	switch (error) {
	case cudaSuccess:
		return "no error";
	case cudaErrorInvalidValue:
		return "invalid argument";
	case cudaErrorMemoryAllocation:
		return "out of memory";
	case cudaErrorInvalidDeviceFunction:
		return "invalid device function";
	case cudaErrorInvalidDevice:
		return "invalid device ordinal";
	case cudaErrorInvalidResourceHandle:
		return "invalid resource handle";
	case cudaErrorIllegalState:
		return "the operation cannot be performed in the present state";
	case cudaErrorNotReady:
		return "device not ready";
	case cudaErrorStreamCaptureUnsupported:
		return "operation not permitted when stream is capturing";
	default:
		return "unrecognized error code";
	}
}

API cudaError_t cudaDeviceSynchronize(void)
{
	device_wait(current_device);
	return cudaSuccess;
}

API cudaError_t cudaStreamCreate(cudaStream_t *pStream)
{
	if (!pStream)
		return emulated_result(cudaErrorInvalidValue);
	*pStream = stream_open(current_device);
	return emulated_result(*pStream ? cudaSuccess : cudaErrorMemoryAllocation);
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *pStream, unsigned int flags)
{
	(void)flags;
	return cudaStreamCreate(pStream);
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *pStream, unsigned int flags, int priority)
{
	(void)flags;
	(void)priority;
	return cudaStreamCreate(pStream);
}

API cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
	if ((uintptr_t)stream <= 2)
		return emulated_result(cudaErrorInvalidResourceHandle);
	stream_close(stream);
	return cudaSuccess;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
	struct stream *which = emulated_stream(stream);

	if (stream_is_capturing(which))
		return emulated_result(cudaErrorStreamCaptureUnsupported);
	stream_wait(which, stream_last_ticket(which));
	return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t stream)
{
	struct stream *which = emulated_stream(stream);

	return stream_reached(which, stream_last_ticket(which)) ? cudaSuccess : cudaErrorNotReady;
}

/* void emulated_timed_kernel(int64_t duration_ns): the host's handle of the kernel. */
API void emulated_timed_kernel(void)
{
}

static cudaError_t launch(const void *func, void **args, cudaStream_t stream)
{
	if (func != (const void *)emulated_timed_kernel)
		return cudaErrorInvalidDeviceFunction;
	if (!args || !args[0] || *(int64_t *)args[0] < 0)
		return cudaErrorInvalidValue;
	stream_enqueue(emulated_stream(stream), (struct work){ .busy_ns = NS_PER_KERNEL_START + *(int64_t *)args[0] });
	return cudaSuccess;
}

API cudaError_t cudaLaunchKernel(const void *func, dim3 gridDim, dim3 blockDim, void **args, size_t sharedMem,
				 cudaStream_t stream)
{
	(void)gridDim;
	(void)blockDim;
	(void)sharedMem;
	return emulated_result(launch(func, args, stream));
}

API cudaError_t cudaLaunchCooperativeKernel(const void *func, dim3 gridDim, dim3 blockDim, void **args,
					    size_t sharedMem, cudaStream_t stream)
{
	(void)gridDim;
	(void)blockDim;
	(void)sharedMem;
	return emulated_result(launch(func, args, stream));
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *func, void **args)
{
	if (!config)
		return emulated_result(cudaErrorInvalidValue);
	return emulated_result(launch(func, args, config->stream));
}
