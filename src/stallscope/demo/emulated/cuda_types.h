/* The few public CUDA runtime types and result codes that the emulation uses; values as in CUDA 12. */
#ifndef EMULATED_CUDA_TYPES_H
#define EMULATED_CUDA_TYPES_H

#include "device.h"

typedef int cudaError_t;
typedef void *cudaStream_t;

enum {
	cudaSuccess = 0,
	cudaErrorInvalidValue = 1,
	cudaErrorMemoryAllocation = 2,
	cudaErrorInvalidDeviceFunction = 98,
	cudaErrorInvalidDevice = 101,
	cudaErrorInvalidResourceHandle = 400,
	cudaErrorNotReady = 600,
	cudaErrorStreamCaptureUnsupported = 900,
	cudaErrorIllegalState = 401,
};

enum {
	cudaMemcpyHostToHost,
	cudaMemcpyHostToDevice,
	cudaMemcpyDeviceToHost,
	cudaMemcpyDeviceToDevice,
	cudaMemcpyDefault,
};

/* Remembers an error for cudaGetLastError and hands it on. */
cudaError_t emulated_result(cudaError_t error);
/* The stream behind a handle of the current device: NULL, 1 and 2 are default streams. */
struct stream *emulated_stream(cudaStream_t handle);

#endif
