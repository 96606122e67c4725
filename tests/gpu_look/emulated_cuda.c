// SPDX-License-Identifier: Apache-2.0
/* libcuda.so.1 of the tests: a launch that a profiler can observe. */
#include <stddef.h>
#include <stdint.h>

void (*emulated_launch_hook)(const char *name, uint64_t start_ns, uint64_t end_ns, uint32_t stream);

void emulated_launch(const char *name, uint64_t start_ns, uint64_t end_ns, uint32_t stream)
{
	void (*hook)(const char *, uint64_t, uint64_t, uint32_t) = __atomic_load_n(&emulated_launch_hook, __ATOMIC_ACQUIRE);

	if (hook)
		hook(name, start_ns, end_ns, stream);
}
