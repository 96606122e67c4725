/* CUDA graphs: work captured on a stream, replayed as one work. */
#include <stdlib.h>

#include "cuda_types.h"
#include "device.h"

static void graph_free(struct graph *graph)
{
	for (uint32_t i = 0; i < graph->n; i++)
		if (graph->works[i].drop)
			graph->works[i].drop(graph->works[i].arg);
	free(graph->works);
	free(graph);
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
	device_wait(emulated_device());
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
