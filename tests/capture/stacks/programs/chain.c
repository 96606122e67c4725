/* Waits at a location that it prints in advance: a chain of functions, with frames of all kinds. Usage: chain WAY */
#include <alloca.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define APART __attribute__((noinline, noclone))

static volatile int n_rounds;
static char *volatile kept;

APART int innermost(int n)
{
	puts("there");
	fflush(stdout);
	if (n_rounds)
		for (;;)
			n_rounds++;
	pause();
	return n + n_rounds;
}

APART int with_alloca(int n)
{
	kept = alloca(n * 16 + 32);
	memset(kept, n, n * 16 + 32);
	return innermost(n) + kept[3];
}

APART int with_many_registers(int a, int b, int c, int d, int e, int f)
{
	int x = with_alloca(a + 1);

	return a * b + c * d + e * f + x * (a + b) + (c + d) * (e + f) + n_rounds;
}

APART int large(int n)
{
	char room[9000];

	kept = room;
	room[n] = n;
	return with_many_registers(n, 2, 3, 4, 5, 6) + room[n + 1];
}

static APART int hidden(int n)
{
	return large(n + 1) + n_rounds;
}

int again(int n);
static int (*volatile once_more)(int) = again; /* else it becomes a loop */

APART int again(int n)
{
	return n ? once_more(n - 1) + n_rounds : hidden(n) + n_rounds;
}

static void handler(int signal)
{
	kept += again(signal % 2);
}

static void *thread(void *argument)
{
	kept += again(argument ? 1 : 2);
	return argument;
}

int main(int argc, char **argv)
{
	pthread_t other;

	if (argc > 1 && !strcmp(argv[1], "spins"))
		n_rounds = 1;
	if (argc > 1 && !strcmp(argv[1], "signal")) {
		signal(SIGUSR1, handler);
		raise(SIGUSR1);
	} else if (argc > 1 && !strcmp(argv[1], "thread")) {
		pthread_create(&other, NULL, thread, NULL);
		pthread_join(other, NULL);
	} else {
		kept += again(3);
	}
	return 0;
}
