/* Makes one system call over and over: prints ns per call of the best of some batches, on each request.
 * syscall_loop getpid|FILE: for each line on standard input one number on standard output. A file is asked by an ioctl
 * that it does not know. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define N_CALLS 1000
#define N_BATCHES 500
#define RM_CONTROL 0xc020462aul

static double ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

int main(int n_args, char **args)
{
	int fd = n_args > 1 ? open(args[1], O_RDONLY) : -1, is_getpid = n_args > 1 && !strcmp(args[1], "getpid");
	char line[64];

	while ((is_getpid || fd >= 0) && fgets(line, sizeof(line), stdin)) {
		double best = 1e18;

		for (int batch = 0; batch < N_BATCHES; batch++) {
			double begin = ns();

			for (int i = 0; i < N_CALLS; i++) {
				if (is_getpid)
					syscall(SYS_getpid);
				else
					ioctl(fd, RM_CONTROL, line);
			}
			begin = (ns() - begin) / N_CALLS;
			best = begin < best ? begin : best;
		}
		printf("%.1f\n", best);
		fflush(stdout);
	}
	return 0;
}
