/* Calls a hooked function over and over: prints ns per call of the best of some batches, on each request.
 * hook_loop NAME: for each line on standard input one number on standard output. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define N_CALLS 20000
#define N_BATCHES 10

int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int cudaFree(long);
int cudaSetDevice(int);

static double ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

static void call(const char *name)
{
	for (int i = 0; i < N_CALLS; i++) {
		if (name[0] == 'n')
			ncclAllReduce(NULL, NULL, 1, 7, 0, (void *)name, NULL);
		else if (name[4] == 'F')
			cudaFree(0);
		else
			cudaSetDevice(0);
	}
}

int main(int n_args, char **args)
{
	char line[64];

	while (n_args > 1 && fgets(line, sizeof(line), stdin)) {
		double best = 1e18;

		for (int batch = 0; batch < N_BATCHES; batch++) {
			double begin = ns();

			call(args[1]);
			begin = (ns() - begin) / N_CALLS;
			best = begin < best ? begin : best;
		}
		printf("%.1f\n", best);
		fflush(stdout);
	}
	return 0;
}
