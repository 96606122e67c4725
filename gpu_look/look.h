/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The layout of the shared memory between `stallscope look` and the library that it loads into a process
 * (src/stallscope/capture/gpu/kernel_window.py). The memory has no file name and ends with both processes.
 */
#ifndef STALLSCOPE_LOOK_H
#define STALLSCOPE_LOOK_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define LOOK_NAME "stallscope-look"
#define LOOK_MAGIC 0x316b6f6f6c707467ull /* "gtplook1" */

enum { N_KERNELS = 1 << 20, N_NAMES = 1 << 12, NAME_BYTES = 256, ERROR_BYTES = 128 };
enum { STARTING = 0, RECORDING = 1, DONE = 2, FAILED = 3 };
enum { AT_LIBRARY = 1, AT_VERSION = 2, AT_SUBSCRIBER = 3, AT_ENABLE = 4 };

struct look_kernel {
	uint64_t start_ns, end_ns; /* on CUPTI's clock */
	uint32_t name, stream, device, pad;
};

struct look_memory {
	uint64_t magic;
	uint32_t version, pid;
	_Atomic uint32_t state, is_cancelled; /* is_cancelled: written by the reader, ends the window early */
	_Atomic uint32_t failed_at;
	int32_t error; /* CUptiResult */
	uint64_t begin_ns, end_ns; /* of the window, on CUPTI's clock */
	uint64_t begin_wall_ns;    /* CLOCK_REALTIME at begin_ns */
	_Atomic uint64_t n_kernels; /* also those without room */
	_Atomic uint64_t n_lost; /* by CUPTI */
	_Atomic uint32_t n_names, is_detached; /* is_detached: CUPTI has left the process */
	uint32_t cupti_version, pad;
	char error_text[ERROR_BYTES];
	char names[N_NAMES][NAME_BYTES];
	struct look_kernel kernels[N_KERNELS];
};

_Static_assert(sizeof(struct look_kernel) == 32, "layout");
_Static_assert(offsetof(struct look_memory, names) == 88 + ERROR_BYTES, "layout of the header");

#endif
