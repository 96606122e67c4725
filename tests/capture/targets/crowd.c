/* Many threads that make calls all the time, while the main one makes collectives: crowd N_THREADS SECONDS. */
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int cudaStreamSynchronize(long, long);
int cudaMalloc(long, long);
int cudaFree(long);

static volatile int is_over;

static void *calls(void *argument)
{
	unsigned seed = (unsigned)(long)argument;

	while (!is_over) {
		switch (rand_r(&seed) % 5) {
		case 0:
			cudaFree(0);
			break;
		case 1:
			cudaStreamSynchronize(rand_r(&seed) % 300, 0);
			break;
		case 2:
			cudaMalloc(0, rand_r(&seed) % 50);
			break;
		case 3:
			usleep(rand_r(&seed) % 300);
			break;
		default:
			for (volatile int i = rand_r(&seed) % 20000; i > 0; i--)
				;
		}
	}
	return NULL;
}

int main(int n_args, char **args)
{
	int n = n_args > 1 ? atoi(args[1]) : 4;
	pthread_t threads[64];
	time_t end = time(NULL) + (n_args > 2 ? atoi(args[2]) : 2);
	char comm[8];

	for (long i = 0; i < n; i++)
		pthread_create(&threads[i], NULL, calls, (void *)(i + 1));
	while (time(NULL) < end) {
		ncclAllReduce(NULL, NULL, 1, 7, 0, comm, NULL);
		usleep(200);
	}
	is_over = 1;
	for (int i = 0; i < n; i++)
		pthread_join(threads[i], NULL);
	return 0;
}
