/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of CUPTI's interface that a window of kernels needs, in own declarations: cupti_activity.h, cupti_callbacks.h,
 * cupti_result.h and cupti_version.h of CUDA 12.4 and 13.0. The record of a kernel begins in the same way in all its
 * versions from CUpti_ActivityKernel3 to 10.
 */
#ifndef STALLSCOPE_CUPTI_ABI_H
#define STALLSCOPE_CUPTI_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int cupti_result; /* 0 is success */

enum { CUPTI_MULTIPLE_SUBSCRIBERS = 39 };
enum { KIND_CONCURRENT_KERNEL = 10 };
enum { DOMAIN_DRIVER = 1, DOMAIN_RUNTIME = 2, SITE_EXIT = 1 };
enum { MIN_VERSION = 14, MAX_VERSION = 139999 }; /* CUDA 11.1 to 13.x; versions are 100 * CUDA's from 13.0 on */

struct kernel_activity {
	uint32_t kind;
	uint32_t caches[3];
	uint64_t start_ns, end_ns, completed_ns;
	uint32_t device, context, stream;
	int32_t grid[3], block[3], shared_bytes[2];
	uint32_t local_bytes[2], correlation;
	int64_t grid_number;
	const char *name;
};

struct callback_data {
	int site;
};

typedef void (*callback)(void *own, int domain, uint32_t which, const struct callback_data *data);
typedef void (*buffer_request)(uint8_t **buffer, size_t *n_bytes, size_t *n_records);
typedef void (*buffer_complete)(void *context, uint32_t stream, uint8_t *buffer, size_t n_bytes, size_t n_valid);

/* CUPTI's functions, in the order of cupti_names. */
struct cupti {
	cupti_result (*version)(uint32_t *version);
	cupti_result (*result_text)(cupti_result result, const char **text);
	cupti_result (*subscribe)(void **subscriber, callback called, void *own);
	cupti_result (*unsubscribe)(void *subscriber);
	cupti_result (*enable_domain)(uint32_t is_on, void *subscriber, int domain);
	cupti_result (*register_buffers)(buffer_request request, buffer_complete complete);
	cupti_result (*enable)(int kind);
	cupti_result (*disable)(int kind);
	cupti_result (*flush)(uint32_t is_forced);
	cupti_result (*next_record)(uint8_t *buffer, size_t n_bytes, struct kernel_activity **record);
	cupti_result (*dropped)(void *context, uint32_t stream, size_t *n);
	cupti_result (*timestamp)(uint64_t *ns);
	cupti_result (*finalize)(void);
};

static const char *const cupti_names[] = {
	"cuptiGetVersion",
	"cuptiGetResultString",
	"cuptiSubscribe",
	"cuptiUnsubscribe",
	"cuptiEnableDomain",
	"cuptiActivityRegisterCallbacks",
	"cuptiActivityEnable",
	"cuptiActivityDisable",
	"cuptiActivityFlushAll",
	"cuptiActivityGetNextRecord",
	"cuptiActivityGetNumDroppedRecords",
	"cuptiGetTimestamp",
	"cuptiFinalize",
};

_Static_assert(offsetof(struct kernel_activity, start_ns) == 16 && offsetof(struct kernel_activity, device) == 40 &&
		       offsetof(struct kernel_activity, stream) == 48 && offsetof(struct kernel_activity, name) == 104,
	       "layout of CUpti_ActivityKernel3 to 10");
_Static_assert(sizeof(struct cupti) == sizeof(cupti_names), "a name for each function");

#endif
