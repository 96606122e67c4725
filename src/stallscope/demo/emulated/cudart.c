/*
 * libcudart.so.12, emulated: devices, streams, events, launches, graphs (memory is in memory.c).
 *
 * Names and calling conventions are those of the CUDA 12 runtime, so that whatever observes the real library
 * observes this one. There is one kernel, emulated_timed_kernel: its only argument is how long it runs.
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

/* void emulated_timed_kernel(int64_t duration_ns): the host's handle of the one kernel. */
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

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int mode)
{
	(void)mode;
	return emulated_result(stream_capture_begin(emulated_stream(stream)) ? cudaSuccess : cudaErrorIllegalState);
}

API cudaError_t cudaStreamEndCapture(cudaStream_t stream, struct graph **pGraph)
{
	if (!pGraph)
		return emulated_result(cudaErrorInvalidValue);
	*pGraph = stream_capture_end(emulated_stream(stream));
	return emulated_result(*pGraph ? cudaSuccess : cudaErrorIllegalState);
}

/* The executable graph takes the works over; the graph stays as an empty shell to be destroyed. */
API cudaError_t cudaGraphInstantiate(struct graph **pGraphExec, struct graph *graph, unsigned long long flags)
{
	(void)flags;
	if (!pGraphExec || !graph)
		return emulated_result(cudaErrorInvalidValue);
	*pGraphExec = malloc(sizeof(*graph));
	if (!*pGraphExec)
		return emulated_result(cudaErrorMemoryAllocation);
	**pGraphExec = *graph;
	*graph = (struct graph){ 0 };
	return cudaSuccess;
}

static void play(struct stream *stream, void *arg, uint64_t n)
{
	struct graph *graph = arg;

	(void)n;
	for (uint32_t i = 0; i < graph->n; i++)
		stream_execute(stream, &graph->works[i]);
}

API cudaError_t cudaGraphLaunch(struct graph *graphExec, cudaStream_t stream)
{
	if (!graphExec)
		return emulated_result(cudaErrorInvalidValue);
	stream_enqueue(emulated_stream(stream), (struct work){ .run = play, .arg = graphExec });
	return cudaSuccess;
}

API cudaError_t cudaGraphExecDestroy(struct graph *graphExec)
{
	if (!graphExec)
		return emulated_result(cudaErrorInvalidValue);
	device_wait(current_device);
	graph_free(graphExec);
	return cudaSuccess;
}

API cudaError_t cudaGraphDestroy(struct graph *graph)
{
	if (!graph)
		return emulated_result(cudaErrorInvalidValue);
	graph_free(graph);
	return cudaSuccess;
}
