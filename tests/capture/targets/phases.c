/* Phases in which one thing takes the time, each between two collectives of the main thread.
 * Three threads: the main one on core 0; a second GPU thread on core 1; one that makes no GPU call, on core 1.
 * Prints for each phase: name begin_ns end_ns category=ns ... (the expected cost of the phase). */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MS 1000000L

int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int cudaStreamSynchronize(long, long);
int cudaMalloc(long, long);
int cudaMemcpy(long, long, size_t, int);
int cudaFree(long);

static long clock_ns(int which)
{
	struct timespec t;

	clock_gettime(which, &t);
	return t.tv_sec * 1000000000L + t.tv_nsec;
}

static long now(void)
{
	return clock_ns(CLOCK_MONOTONIC);
}

static void spin_ms(long ms)
{
	long end = now() + ms * MS;

	while (now() < end)
		;
}

static void sleep_ms(long ms)
{
	struct timespec t = {ms / 1000, ms % 1000 * MS};

	clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
}

static void pin(int core)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(core, &set);
	sched_setaffinity(0, sizeof(set), &set);
}

/* ---- workers: they get their tasks through a futex word ---- */

enum job { NOTHING, QUIT, SPIN30, SPIN25_SLEEP15, SLEEP30_WRITE, SYNC60, MALLOC20, FAULT25 };

struct worker {
	volatile int job, done;
	int makes_calls, pipe, uffd;
	char *page;
};

static void wait_for_change(volatile int *word, int from)
{
	while (*word == from)
		syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, from, NULL, NULL, 0);
}

static void post(volatile int *word, int value)
{
	*word = value;
	syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static void serve_page(struct worker *w)
{
	static char zero[4096] __attribute__((aligned(4096)));
	struct uffdio_copy copy = {.dst = (unsigned long)w->page, .src = (unsigned long)zero, .len = 4096};

	sleep_ms(25);
	ioctl(w->uffd, UFFDIO_COPY, &copy);
}

static void *work(void *argument)
{
	struct worker *w = argument;
	int job;

	pin(1);
	if (w->makes_calls)
		cudaFree(0);
	for (;;) {
		wait_for_change(&w->job, NOTHING);
		job = w->job;
		w->job = NOTHING;
		switch (job) {
		case QUIT:
			return NULL;
		case SPIN30:
			spin_ms(30);
			break;
		case SPIN25_SLEEP15:
			spin_ms(25);
			sleep_ms(15);
			break;
		case SLEEP30_WRITE:
			sleep_ms(30);
			if (write(w->pipe, "x", 1) != 1)
				abort();
			break;
		case SYNC60:
			cudaStreamSynchronize(60000, 0);
			break;
		case MALLOC20:
			cudaMalloc(10000, 10000);
			break;
		case FAULT25:
			serve_page(w);
			break;
		}
		post(&w->done, 1);
	}
}

static void start(struct worker *w, int job)
{
	w->done = 0;
	post(&w->job, job);
}

static void join(struct worker *w)
{
	wait_for_change(&w->done, 0);
}

/* ---- phases ---- */

static char comm[64];
static long begin_ns;

static void collective(void)
{
	ncclAllReduce(NULL, NULL, 4096, 7, 0, comm, NULL);
}

static void begin(void)
{
	collective();
	begin_ns = now();
}

/* end(name, "category", ns, ..., NULL) */
static void end(const char *name, ...)
{
	long end_ns = now();
	const char *category;
	va_list rest;

	collective();
	printf("%s %ld %ld", name, begin_ns, end_ns);
	va_start(rest, name);
	while ((category = va_arg(rest, const char *)))
		printf(" %s=%ld", category, va_arg(rest, long));
	va_end(rest);
	printf("\n");
	fflush(stdout);
	begin();
}

static pid_t child_does(void (*what)(int), int argument)
{
	pid_t child = fork();

	if (child)
		return child;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	pin(1);
	what(argument);
	_exit(0);
}

static void stop_parent_for(int ms)
{
	sleep_ms(5);
	kill(getppid(), SIGSTOP);
	sleep_ms(ms);
	kill(getppid(), SIGCONT);
}

static void answer_later(int fd)
{
	sleep_ms(25);
	if (write(fd, "x", 1) != 1)
		abort();
	sleep_ms(5);
}

static void end_later(int ms)
{
	sleep_ms(ms);
}

static sigjmp_buf out;

static void jump_out(int signal)
{
	siglongjmp(out, signal);
}

static void leave_a_sync_without_return(void)
{
	struct itimerval after_10ms = {.it_value = {0, 10000}};

	signal(SIGALRM, jump_out);
	setitimer(ITIMER_REAL, &after_10ms, NULL);
	if (!sigsetjmp(out, 1))
		cudaStreamSynchronize(1000000, 0);
}

/* Gives in *argument when its call began: until then a busy core may have kept it waiting, and it is not a known thread. */
static void *brief(void *argument)
{
	pin(1);
	*(long *)argument = now();
	cudaStreamSynchronize(15000, 0);
	return NULL;
}

int main(int n_args, char **args)
{
	int n_rounds = n_args > 1 ? atoi(args[1]) : 1, pipes[2];
	struct worker gpu = {.makes_calls = 1}, plain = {0};
	struct uffdio_api api = {.api = UFFD_API};
	pthread_t threads[3];
	pid_t child;
	long called_ns;
	char byte;

	pin(0);
	cudaFree(0);
	if (pipe(pipes))
		abort();
	plain.pipe = pipes[1];
	plain.uffd = syscall(SYS_userfaultfd, O_CLOEXEC);
	ioctl(plain.uffd, UFFDIO_API, &api);
	pthread_create(&threads[0], NULL, work, &gpu);
	pthread_create(&threads[1], NULL, work, &plain);
	sleep_ms(5);
	begin();
	for (int round = 0; round < n_rounds; round++) {
		struct timeval tv = {0, 30000};
		struct pollfd fd = {.fd = pipes[0], .events = POLLIN};
		fd_set set;
		long cpu;
		char *page;

		sleep_ms(30);
		end("sleep", "sleep", 30 * MS, NULL);
		poll(NULL, 0, 30);
		end("poll_without_descriptors", "sleep", 30 * MS, NULL);
		select(0, NULL, NULL, NULL, &tv);
		end("select_without_descriptors", "sleep", 30 * MS, NULL);
		poll(&fd, 1, 30);
		end("poll", "net", 30 * MS, NULL);
		FD_ZERO(&set);
		FD_SET(pipes[0], &set);
		tv.tv_usec = 30000;
		select(pipes[0] + 1, &set, NULL, NULL, &tv);
		end("select", "net", 30 * MS, NULL);
		cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID);
		spin_ms(30);
		cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu;
		end("spin", "on_cpu", cpu, "preempted", 30 * MS - cpu, NULL);
		start(&plain, SLEEP30_WRITE);
		if (read(pipes[0], &byte, 1) != 1)
			abort();
		join(&plain);
		end("pipe", "net", 30 * MS, NULL);
		start(&plain, SPIN30);
		join(&plain);
		end("futex", "lock", 30 * MS, NULL);
		start(&gpu, SPIN25_SLEEP15);
		join(&gpu);
		end("handover", "on_cpu", 25 * MS, "sleep", 15 * MS, NULL);
		start(&gpu, MALLOC20);
		join(&gpu);
		end("handover_alloc", "alloc", 20 * MS, NULL);
		cudaStreamSynchronize(30000, 0);
		end("sync", "wait_gpu", 30 * MS, NULL);
		cudaStreamSynchronize(0, 20000);
		end("spinning_sync", "wait_gpu", 20 * MS, NULL);
		cudaStreamSynchronize(0, 0);
		cudaStreamSynchronize(20000, 0);
		end("second_sync", "device", 20 * MS, NULL);
		cudaMalloc(10000, 10000);
		end("malloc", "alloc", 20 * MS, NULL);
		cudaMemcpy(15000, 10000, 4096, 1);
		end("memcpy_with_driver_call", "copy", 25 * MS, NULL);
		start(&gpu, SYNC60);
		sleep_ms(30);
		spin_ms(25);
		join(&gpu);
		end("one_syncs_one_spins", "wait_gpu", 35 * MS, "on_cpu", 25 * MS, NULL);
		child = child_does(answer_later, pipes[1]);
		begin();
		if (read(pipes[0], &byte, 1) != 1)
			abort();
		end("child_answers", "child", 25 * MS, NULL);
		waitpid(child, NULL, 0);
		child = child_does(end_later, 20);
		begin();
		waitpid(child, NULL, 0);
		end("child_ends", "child", 20 * MS, NULL);
		child = child_does(stop_parent_for, 60);
		begin();
		spin_ms(75);
		end("stop", "stopped", 60 * MS, NULL);
		waitpid(child, NULL, 0);
		child = child_does(stop_parent_for, 20);
		begin();
		sleep_ms(50);
		end("stop_in_sleep", "stopped", 20 * MS, "sleep", 30 * MS, NULL);
		waitpid(child, NULL, 0);
		begin();
		leave_a_sync_without_return();
		cudaFree(0); /* the next call shows that it was left */
		sleep_ms(20);
		end("jump", "wait_gpu", 10 * MS, "sleep", 20 * MS, NULL);
		pthread_create(&threads[2], NULL, brief, &called_ns);
		pthread_join(threads[2], NULL);
		end("brief_thread", "wait_gpu", 15 * MS, "lock", called_ns - begin_ns, NULL);
		if (plain.uffd < 0)
			continue;
		page = plain.page = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		ioctl(plain.uffd, UFFDIO_REGISTER,
		      &(struct uffdio_register){{(unsigned long)page, 8192}, UFFDIO_REGISTER_MODE_MISSING, 0});
		start(&plain, FAULT25);
		*(volatile char *)page;
		join(&plain);
		end("page_fault", "fault", 25 * MS, NULL);
		plain.page = page + 4096;
		start(&plain, FAULT25);
		ioctl(pipes[0], FIONREAD, page + 4096);
		join(&plain);
		end("ioctl", "driver", 25 * MS, NULL);
		munmap(page, 8192);
	}
	start(&gpu, QUIT);
	start(&plain, QUIT);
	pthread_join(threads[0], NULL);
	pthread_join(threads[1], NULL);
	return 0;
}
