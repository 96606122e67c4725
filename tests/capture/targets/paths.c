/* Calls a traced function from a chain of functions that follows from the number of the call. Many of the chains have
 * frames of the same size, so that the call is made from the same place at the same depth. Usage: paths CALLS */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define APART __attribute__((noinline, noclone))

int cudaStreamSynchronize(long sleep_us, long spin_us);

typedef int step(int n);
static volatile int zero;

APART int at_last(int n)
{
	return cudaStreamSynchronize(0, 0) + n + zero;
}

APART int first(int n)
{
	return at_last(n + 1) * 3 + zero;
}

APART int second(int n)
{
	return at_last(n + 2) * 5 + zero;
}

APART int wide(int n)
{
	volatile int room[24];

	room[n & 7] = n;
	return at_last(n + 3) + room[n & 7] + zero;
}

static step *const inner[] = { first, second, wide };

APART int left(int n)
{
	return inner[n % 3](n) * 7 + zero;
}

APART int right(int n)
{
	return inner[n % 3](n) * 11 + zero;
}

static step *const outer[] = { left, right };
int deeper(int n, int depth);
static int (*volatile once_more)(int, int) = deeper;

APART int deeper(int n, int depth)
{
	return depth ? once_more(n, depth - 1) + zero : outer[n / 3 % 2](n) + zero;
}

int main(int argc, char **argv)
{
	int n_calls = argc > 1 ? atoi(argv[1]) : 1;
	struct timespec pause = { 0, 20000 };
	int sum = 0;

	puts("there");
	fflush(stdout);
	getchar();
	for (int i = 0; i < n_calls; i++) {
		sum += deeper(i, i / 6 % 4);
		nanosleep(&pause, NULL);
	}
	return sum & zero;
}
