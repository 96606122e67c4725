/* Busy intervals between two collectives, as the thread's own CPU clock sees them.
 * busy N MS NAP_US HOG: N intervals of MS wall ms; HOG 1: next to a process that spins on the same core, 2: next to
 * a process that also sleeps. Prints for each: wall ns, CPU ns. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);

static long ns(int clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return t.tv_sec * 1000000000L + t.tv_nsec;
}

static void spin(long length_ns)
{
	long end = ns(CLOCK_MONOTONIC) + length_ns;

	while (ns(CLOCK_MONOTONIC) < end)
		;
}

static void hog(int naps)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (;;) {
		spin(3000000);
		if (naps)
			usleep(1000);
	}
}

int main(int n_args, char **args)
{
	long n = atol(args[1]), length_ns = atol(args[2]) * 1000000, nap_us = atol(args[3]), kind = atol(args[4]);
	char *comm = (char *)0xc0ffee;
	cpu_set_t set;
	pid_t child = 0;

	CPU_ZERO(&set);
	CPU_SET(0, &set);
	if (kind)
		sched_setaffinity(0, sizeof(set), &set);
	if (kind && !(child = fork()))
		hog(kind == 2);
	for (long i = 0; i < n; i++) {
		long wall, cpu;

		ncclAllReduce(NULL, NULL, i, 7, 0, comm, NULL);
		wall = ns(CLOCK_MONOTONIC);
		cpu = ns(CLOCK_THREAD_CPUTIME_ID);
		spin(length_ns);
		cpu = ns(CLOCK_THREAD_CPUTIME_ID) - cpu;
		wall = ns(CLOCK_MONOTONIC) - wall;
		ncclAllReduce(NULL, NULL, i, 7, 0, comm, NULL);
		printf("%ld %ld\n", wall, cpu);
		if (nap_us)
			usleep(nap_us);
	}
	if (child) {
		kill(child, SIGKILL);
		waitpid(child, NULL, 0);
	}
	return 0;
}
