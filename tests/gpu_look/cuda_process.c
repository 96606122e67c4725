// SPDX-License-Identifier: Apache-2.0
/*
 * A job of the tests. Each 2 ms it launches a kernel of 500 us and a kernel of NCCL of 250 us, until its input ends.
 * Arguments: "profiled" subscribes to CUPTI first, "idle" launches nothing, "computes" never waits, "signals" counts
 * SIGRTMIN. At its end it prints how many launches and signals it had, and the sum of a register test.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

void emulated_launch(const char *name, uint64_t start_ns, uint64_t end_ns, uint32_t stream);
static int n_signals;

static void on_signal(int number)
{
	(void)number;
	__atomic_fetch_add(&n_signals, 1, __ATOMIC_RELAXED); /* any thread may receive it */
}

static uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "";
	struct pollfd input = { .fd = 0, .events = POLLIN };
	unsigned long n_launches = 0, n_interrupted = 0;

	if (!strcmp(mode, "profiled")) {
		void *cupti = dlopen(argv[2], RTLD_NOW), *subscriber;

		((int (*)(void **, void *, void *))dlsym(cupti, "cuptiSubscribe"))(&subscriber, (void *)on_signal, NULL);
	}
	if (!strcmp(mode, "signals")) {
		struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };

		sigaction(SIGRTMIN, &action, NULL);
	}
	printf("ready %d\n", (int)getpid());
	fflush(stdout);
	for (;;) {
		uint64_t at = now();
		int ready = poll(&input, 1, strcmp(mode, "computes") ? 2 : 0);

		n_interrupted += ready < 0;
		if (ready > 0)
			break;
		if (!strcmp(mode, "idle"))
			continue;
		emulated_launch("_Z4gemmPf", at, at + 500000, 7);
		emulated_launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at + 500000, at + 750000, 8);
		n_launches += 2;
	}
	printf("end %lu %d %lu\n", n_launches, __atomic_load_n(&n_signals, __ATOMIC_RELAXED), n_interrupted);
	return 0;
}
