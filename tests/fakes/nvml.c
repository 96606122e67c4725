/*
 * A management library (libnvidia-ml.so.1) whose GPUs are described in a file, $FAKE_NVML, which each call reads.
 *
 * A line of the file: WHICH KEY VALUE, where WHICH is the number of a GPU, or GPU.PARTITION. Values without a line are
 * not supported. `process` (PID BYTES), `use` (PID PERCENT) and `busy` (MICROSECONDS PERCENT, the samples of the
 * utilisation) may have several lines; each `xid` is reported once, in order. A GPU with `lost` answers no call.
 * `counter ID VALUE` is a hardware counter; a GPU without such a line does not support counters. Signatures as in
 * nvml.h (CUDA 13).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { OK = 0, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, SMALL = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, LOST = 15 };
enum { MOST = 64, LINE = 512 };

typedef struct { char which[16]; } device;
typedef unsigned long long u64;

static device handles[MOST];
static unsigned n_handles;

static FILE *state(void)
{
	const char *path = getenv("FAKE_NVML");

	return path ? fopen(path, "r") : NULL;
}

/* The n-th value of a key; 0 where there is none. */
static int told(const char *which, const char *key, int n, char *value)
{
	char line[LINE], first[64], second[64];
	int at, found = 0;
	FILE *file = state();

	while (file && !found && fgets(line, sizeof line, file))
		if (sscanf(line, "%63s %63s %n", first, second, &at) == 2 && !strcmp(first, which) &&
		    !strcmp(second, key) && n-- == 0) {
			line[strcspn(line, "\n")] = 0;
			strcpy(value, line + at);
			found = 1;
		}
	if (file)
		fclose(file);
	return found;
}

static int number(device *one, const char *key, u64 *value)
{
	char text[LINE];

	if (told(one->which, "lost", 0, text))
		return LOST;
	if (!told(one->which, key, 0, text))
		return UNSUPPORTED;
	*value = strtoull(text, NULL, 0);
	return OK;
}

static int small(device *one, const char *key, unsigned *value)
{
	u64 wide = 0;
	int result = number(one, key, &wide);

	*value = (unsigned)wide;
	return result;
}

static int word(device *one, const char *key, char *out, unsigned size)
{
	char text[LINE];

	if (!told(one->which, key, 0, text))
		return UNSUPPORTED;
	snprintf(out, size, "%s", text);
	return OK;
}

static device *handle(const char *which)
{
	unsigned i;

	for (i = 0; i < n_handles; i++)
		if (!strcmp(handles[i].which, which))
			return &handles[i];
	strcpy(handles[n_handles].which, which);
	return &handles[n_handles++];
}

int nvmlInitWithFlags(unsigned flags)
{
	char text[LINE];

	return told("driver", "missing", 0, text) ? DRIVER_NOT_LOADED : OK;
}

int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == DRIVER_NOT_LOADED ? "Driver Not Loaded" : "an error"; }

int nvmlDeviceGetCount_v2(unsigned *count)
{
	char which[16], text[LINE];

	for (*count = 0; *count < MOST; ++*count) {
		snprintf(which, sizeof which, "%u", *count);
		if (!told(which, "uuid", 0, text))
			break;
	}
	return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **out)
{
	char which[16];

	snprintf(which, sizeof which, "%u", index);
	*out = handle(which);
	return OK;
}

int nvmlDeviceGetIndex(device *one, unsigned *index) { *index = atoi(one->which); return OK; }
int nvmlDeviceGetMinorNumber(device *one, unsigned *minor) { return small(one, "minor", minor); }
int nvmlDeviceGetUUID(device *one, char *out, unsigned size) { return word(one, "uuid", out, size); }
int nvmlDeviceGetName(device *one, char *out, unsigned size) { return word(one, "name", out, size); }

int nvmlDeviceGetMigMode(device *one, unsigned *now, unsigned *next)
{
	int result = small(one, "mig", now);

	*next = *now;
	return result;
}

int nvmlDeviceGetMaxMigDeviceCount(device *one, unsigned *count) { *count = 7; return OK; }

int nvmlDeviceGetMigDeviceHandleByIndex(device *one, unsigned index, device **out)
{
	char which[32], text[LINE];

	snprintf(which, sizeof which, "%.8s.%u", one->which, index);
	if (!told(which, "uuid", 0, text))
		return NOT_FOUND;
	*out = handle(which);
	return OK;
}

int nvmlDeviceGetMemoryInfo(device *one, u64 *memory)
{
	int result = number(one, "memory_total_bytes", &memory[0]);

	if (result)
		return result;
	number(one, "memory_used_bytes", &memory[2]);
	memory[1] = memory[0] - memory[2];
	return OK;
}

int nvmlDeviceGetUtilizationRates(device *one, unsigned *use) { use[1] = 0; return small(one, "utilization_percent", use); }

int nvmlDeviceGetClockInfo(device *one, int which, unsigned *mhz)
{
	return small(one, which == 1 ? "sm_mhz" : which == 2 ? "memory_mhz" : "other_mhz", mhz);
}

int nvmlDeviceGetMaxClockInfo(device *one, int which, unsigned *mhz) { return small(one, which == 1 ? "sm_max_mhz" : "none", mhz); }
int nvmlDeviceGetCurrentClocksEventReasons(device *one, u64 *bits) { return number(one, "clock_reasons", bits); }
int nvmlDeviceGetPowerUsage(device *one, unsigned *mw) { return small(one, "power_mw", mw); }
int nvmlDeviceGetEnforcedPowerLimit(device *one, unsigned *mw) { return small(one, "power_limit_mw", mw); }
int nvmlDeviceGetPowerManagementDefaultLimit(device *one, unsigned *mw) { return small(one, "power_default_mw", mw); }
int nvmlDeviceGetTemperature(device *one, int sensor, unsigned *degrees) { return small(one, "temperature_celsius", degrees); }
int nvmlDeviceGetTotalEccErrors(device *one, int type, int since, u64 *n)
{
	if (since != 0)
		return INVALID;
	return number(one, type == 1 ? "n_ecc_uncorrected" : "n_ecc_corrected", n);
}

int nvmlDeviceGetCurrPcieLinkGeneration(device *one, unsigned *n) { return small(one, "pcie_generation", n); }
int nvmlDeviceGetCurrPcieLinkWidth(device *one, unsigned *n) { return small(one, "pcie_width", n); }
int nvmlDeviceGetMaxPcieLinkGeneration(device *one, unsigned *n) { return small(one, "pcie_max_generation", n); }
int nvmlDeviceGetMaxPcieLinkWidth(device *one, unsigned *n) { return small(one, "pcie_max_width", n); }

int nvmlDeviceGetNvLinkState(device *one, unsigned link, unsigned *is_up)
{
	unsigned up;
	int result = small(one, "n_nvlinks_up", &up);

	*is_up = link < up;
	return result;
}

struct sample { u64 at_us, value; };

int nvmlDeviceGetSamples(device *one, int kind, u64 since_us, int *type, unsigned *count, struct sample *out)
{
	char text[LINE];
	unsigned n = 0, room = out ? *count : 0;
	struct sample next;
	int i;

	for (i = 0; kind == 1 && told(one->which, "busy", i, text); i++)
		if (sscanf(text, "%llu %llu", &next.at_us, &next.value) == 2 && next.at_us > since_us) {
			if (n < room)
				out[n] = next;
			n++;
		}
	*type = 1;
	*count = n;
	return n ? OK : NOT_FOUND;
}

struct field { unsigned id, scope; long long at, took; unsigned type; int result; u64 value; };

int nvmlDeviceGetFieldValues(device *one, int n, struct field *fields)
{
	int i;

	for (i = 0; i < n; i++) {
		/* 91: link count; 38, 45, 52, 59: checksum, checksum, replay and recovery errors of all links;
		 * 161, 162, 163: replay, recovery and checksum errors of a link */
		char of_link[32];
		const char *key = fields[i].id == 91 ? "n_nvlinks" : fields[i].id == 52 ? "n_nvlink_errors" : of_link;

		snprintf(of_link, sizeof(of_link), "nvlink_%u_%u", fields[i].id, fields[i].scope);
		fields[i].type = fields[i].id == 91 ? 1 : 3;
		fields[i].result = number(one, key, &fields[i].value);
	}
	return OK;
}

struct process { unsigned pid; u64 bytes; unsigned gpu_instance, compute_instance; };

int nvmlDeviceGetComputeRunningProcesses_v3(device *one, unsigned *count, struct process *out)
{
	char text[LINE];
	unsigned n = 0, room = out ? *count : 0;

	if (told(one->which, "lost", 0, text))
		return LOST;
	if (told(one->which, "no_processes", 0, text))
		return UNSUPPORTED;
	while (told(one->which, "process", n, text)) {
		if (n < room && sscanf(text, "%u %llu", &out[n].pid, &out[n].bytes) == 2)
			out[n].gpu_instance = out[n].compute_instance = ~0u;
		n++;
	}
	*count = n;
	return n > room ? SMALL : OK;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(device *one, unsigned *count, struct process *out)
{
	*count = 0;
	return OK;
}

struct use { unsigned pid; u64 at_us; unsigned sm_percent, memory_percent, encoder_percent, decoder_percent; };

/* The `use` of each process (PID PERCENT), sampled now. */
int nvmlDeviceGetProcessUtilization(device *one, struct use *out, unsigned *count, u64 since_us)
{
	char text[LINE];
	unsigned n = 0, room = out ? *count : 0;
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	while (told(one->which, "use", n, text)) {
		if (n < room) {
			memset(&out[n], 0, sizeof out[n]);
			sscanf(text, "%u %u", &out[n].pid, &out[n].sm_percent);
			out[n].at_us = now.tv_sec * 1000000ULL + now.tv_nsec / 1000;
		}
		n++;
	}
	*count = n;
	return !n ? NOT_FOUND : n > room ? SMALL : OK;
}

struct counters { device *device; };
struct metric { unsigned id; int result; double value; const char *names[3]; };
struct metrics { unsigned version, n; struct counters *since, *now; struct metric metrics[]; };

static unsigned n_samples; /* allocated and not freed */

int nvmlGpmQueryDeviceSupport(device *one, unsigned *support)
{
	char text[LINE];

	support[1] = told(one->which, "counter", 0, text);
	return OK;
}

int nvmlGpmSampleAlloc(struct counters **out)
{
	*out = calloc(1, sizeof **out);
	n_samples++;
	return OK;
}

int nvmlGpmSampleFree(struct counters *sample)
{
	free(sample);
	n_samples--;
	return OK;
}

int nvmlGpmSampleGet(device *one, struct counters *sample)
{
	char text[LINE];

	sample->device = one;
	return told(one->which, "lost", 0, text) ? LOST : OK;
}

int nvmlGpmMetricsGet(struct metrics *all)
{
	char text[LINE];
	unsigned i, id;
	int n;

	if (all->version != 1 || all->since->device != all->now->device)
		return INVALID;
	for (i = 0; i < all->n; i++) {
		all->metrics[i].result = UNSUPPORTED;
		for (n = 0; told(all->now->device->which, "counter", n, text); n++)
			if (sscanf(text, "%u %lf", &id, &all->metrics[i].value) == 2 && id == all->metrics[i].id) {
				all->metrics[i].result = OK;
				break;
			}
	}
	return OK;
}

unsigned n_open_samples(void) { return n_samples; }

struct event { device *device; u64 type, data; unsigned gpu_instance, compute_instance; };

static device *watched[MOST];
static int told_xids[MOST];
static unsigned n_watched;

int nvmlEventSetCreate(void **set) { *set = &watched; n_watched = 0; return OK; }
int nvmlEventSetFree(void *set) { return OK; }

int nvmlDeviceRegisterEvents(device *one, u64 types, void *set)
{
	if (types != 8)
		return INVALID;
	told_xids[n_watched] = 0;
	watched[n_watched++] = one;
	return OK;
}

int nvmlEventSetWait_v2(void *set, struct event *out, unsigned timeout_ms)
{
	char text[LINE];
	unsigned i;

	for (i = 0; i < n_watched; i++)
		if (told(watched[i]->which, "xid", told_xids[i], text)) {
			told_xids[i]++;
			memset(out, 0, sizeof *out);
			out->device = watched[i];
			out->type = 8;
			out->data = strtoull(text, NULL, 0);
			return OK;
		}
	return TIMEOUT;
}
