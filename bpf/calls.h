/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* CUDA calls: their arguments, their count and duration, and the memory that the process holds.
 *
 * Every call that returns adds to a statistic by process and function; only slow calls and failed calls become
 * records. Balances of memory are also kept here, so that a full ring does not make them wrong. */
#ifndef STALLSCOPE_CALLS_H
#define STALLSCOPE_CALLS_H

#include "probe.h"

#define N_FUNCTIONS 2048
#define N_OPERATIONS 4096
#define N_ALLOCATIONS (1 << 18)
#define N_BALANCES 4096
#define N_ERRORS 4096
#define SHUTTING_DOWN 4 /* cudaErrorCudartUnloading, CUDA_ERROR_DEINITIALIZED: returned to a process that is exiting */
#define NOT_READY 600 /* cudaErrorNotReady, CUDA_ERROR_NOT_READY: an answer, not an error */
#define SAME_ERROR_NS 1000000000
#define FIRST_CONTEXT_NS 1000000 /* a call that initialises the driver takes longer; later calls take less */
#define YOUNG_NS 2000000000

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, N_FUNCTIONS);
	__type(key, u32);
	__type(value, struct function);
} functions __weak SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, N_OPERATIONS);
	__type(key, struct operation_key);
	__type(value, struct operation);
} operations __weak SEC(".maps");

struct live_key {
	u64 address; /* or handle */
	u32 tgid;
	u32 is_handle;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, N_ALLOCATIONS);
	__type(key, struct live_key);
	__type(value, struct live);
} allocations __weak SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, N_BALANCES);
	__type(key, struct balance_key);
	__type(value, struct balance);
} balances __weak SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, N_PROCESSES);
	__type(key, u32);
	__type(value, struct pinned);
} pinned __weak SEC(".maps");

struct error_key {
	u32 tgid;
	u16 symbol;
	u16 spare;
	s32 result;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, N_ERRORS);
	__type(key, struct error_key);
	__type(value, s64);
} errors __weak SEC(".maps");

static const struct operation new_operation;
static const struct balance new_balance;
static const struct pinned new_pinned;

INLINE struct function *function_of(u64 cookie)
{
	u32 symbol = cookie_symbol(cookie);

	return bpf_map_lookup_elem(&functions, &symbol);
}

/* args[1] is the first argument; arguments on the stack are read only if the function has relevant ones there. */
INLINE void all_arguments(struct pt_regs *ctx, const struct function *f, u64 args[16])
{
#ifdef __TARGET_ARCH_arm64
	args[1] = ARG(ctx, 1), args[2] = ARG(ctx, 2), args[3] = ARG(ctx, 3), args[4] = ARG(ctx, 4);
	args[5] = ARG(ctx, 5), args[6] = ARG(ctx, 6), args[7] = ARG(ctx, 7), args[8] = ARG(ctx, 8);
	if (f->n_stack > 2)
		bpf_probe_read_user(&args[9], 8, (void *)PT_REGS_SP(ctx));
#else
	args[1] = PT_REGS_PARM1(ctx), args[2] = PT_REGS_PARM2(ctx), args[3] = PT_REGS_PARM3(ctx);
	args[4] = PT_REGS_PARM4(ctx), args[5] = PT_REGS_PARM5(ctx), args[6] = ctx->r9;
	if (f->n_stack)
		bpf_probe_read_user(&args[7], 24, (void *)(PT_REGS_SP(ctx) + 8));
#endif
}

INLINE u32 half_at(u64 address)
{
	u32 half = 0;

	bpf_probe_read_user(&half, sizeof(half), (void *)address);
	return half;
}

/* A structure of three sizes that is passed by value: on the stack on x86-64, by reference on arm64. */
INLINE void extent(const u64 args[16], u32 arm_argument, u64 size[3])
{
#ifdef __TARGET_ARCH_arm64
	bpf_probe_read_user(size, 24, (void *)args[MASK(arm_argument, 15)]);
#else
	size[0] = args[7], size[1] = args[8], size[2] = args[9];
#endif
}

/* ---- pinned memory of the host ---- */

INLINE struct pinned *pinned_of(u32 tgid)
{
	return entry_of(&pinned, &tgid, &new_pinned);
}

/* Global functions: the verifier walks their loops once, not at every call. */
__weak __attribute__((noinline)) int pin(u32 tgid, u64 address, u64 n_bytes)
{
	struct pinned *p = pinned_of(tgid);

	if (!p)
		return 0;
	for (u32 i = 0; i < N_PINNED; i++) {
		struct range *r = &p->ranges[MASK(i, N_PINNED - 1)];

		if (r->begin || __sync_val_compare_and_swap(&r->begin, 0, address))
			continue;
		r->end = address + n_bytes;
		if (p->n_used <= i)
			p->n_used = i + 1;
		return 1;
	}
	p->is_partial = 1;
	return 0;
}

__weak __attribute__((noinline)) int unpin(u32 tgid, u64 address)
{
	struct pinned *p = bpf_map_lookup_elem(&pinned, &tgid);

	if (!p)
		return 0;
	for (u32 i = 0; i < N_PINNED; i++) {
		struct range *r = &p->ranges[MASK(i, N_PINNED - 1)];

		if (i >= p->n_used)
			return 0;
		if (r->begin != address)
			continue;
		r->end = 0;
		r->begin = 0;
		return 1;
	}
	return 0;
}

__weak __attribute__((noinline)) int is_pinned(u32 tgid, u64 address)
{
	struct pinned *p = bpf_map_lookup_elem(&pinned, &tgid);

	if (!p)
		return 0;
	for (u32 i = 0; i < N_PINNED; i++) {
		struct range *r = &p->ranges[MASK(i, N_PINNED - 1)];

		if (i >= p->n_used)
			return 0;
		if (address >= r->begin && address < r->end)
			return 1;
	}
	return 0;
}

/* Memory that is not known to be pinned counts as pageable only if all pinned memory of the process is known. */
INLINE u8 host_memory(u32 tgid, const struct details *d)
{
	bool from = d->direction == HOST_TO_DEVICE, to = d->direction == DEVICE_TO_HOST;
	struct pinned *p;

	if (!from && !to && d->direction != BY_ADDRESS)
		return 0;
	p = bpf_map_lookup_elem(&pinned, &tgid);
	if (!p)
		return 0;
	if (!to && is_pinned(tgid, d->source))
		return HOST_PINNED;
	if (!from && is_pinned(tgid, d->address))
		return HOST_PINNED;
	return (from || to) && p->is_whole && !p->is_partial ? HOST_PAGEABLE : 0;
}

/* ---- arguments of a call ---- */

/* cudaMemcpy3DParms, cudaMemcpy3DPeerParms (driver_types.h 11 to 13). With an array at one end the width counts
 * elements, whose size is not in the arguments. */
INLINE void runtime_3d(struct details *d, u64 at, u64 second)
{
	u64 size[3] = {};

	d->source = user_word(at + 32);
	d->address = user_word(at + second + 32);
	bpf_probe_read_user(size, sizeof(size), (void *)(at + 2 * second));
	d->count_bytes = user_word(at) || user_word(at + second) ? -1 : (s64)(size[0] * size[1] * size[2]);
}

/* The end of a copy in CUDA_MEMCPY2D and CUDA_MEMCPY3D: its type of memory, then its address on the host and on the
 * device (cuda.h 11 to 13). Returns the type: 1 host, 2 device, 3 array, 4 unified. */
INLINE u32 driver_end(u64 at, u64 *address)
{
	u32 type = half_at(at);

	*address = user_word(at + (type == 1 ? 8 : 16));
	return type;
}

INLINE void driver_copy(struct details *d, u64 source, u64 target, u64 size, u32 n_sizes)
{
	u32 from = driver_end(source, &d->source), to = driver_end(target, &d->address);
	u64 sizes[3] = { 0, 1, 1 };

	bpf_probe_read_user(sizes, 16, (void *)size);
	if (n_sizes > 2)
		sizes[2] = user_word(size + 16);
	d->count_bytes = sizes[0] * sizes[1] * sizes[2];
	if (d->direction)
		return;
	if (from == 4 || to == 4)
		d->direction = BY_ADDRESS;
	else
		d->direction = from == 1 ? (to == 1 ? HOST_TO_HOST : HOST_TO_DEVICE) :
			       to == 1	 ? DEVICE_TO_HOST :
					   DEVICE_TO_DEVICE;
}

INLINE void copied(struct details *d, const struct function *f, const u64 args[16])
{
	switch (f->shape) {
	case SHAPE_RUNTIME_3D:
		runtime_3d(d, args[1], 64);
		d->direction = half_at(args[1] + 152) + 1;
		return;
	case SHAPE_RUNTIME_3D_PEER:
		runtime_3d(d, args[1], 72);
		return;
	case SHAPE_DRIVER_2D:
		driver_copy(d, args[1] + 16, args[1] + 72, args[1] + 112, 2);
		return;
	case SHAPE_DRIVER_3D:
		driver_copy(d, args[1] + 32, args[1] + 120, args[1] + 176, 3);
		return;
	}
	if (f->kind)
		d->direction = (u8)args[MASK(f->kind, 15)] + 1;
	if (f->source)
		d->source = args[MASK(f->source, 15)];
	if (f->target)
		d->address = args[MASK(f->target, 15)];
}

INLINE void launched(struct details *d, const struct function *f, const u64 args[16])
{
	d->handle = args[1];
	if (f->shape == SHAPE_LAUNCH_RUNTIME) {
		d->grid[0] = args[2], d->grid[1] = args[2] >> 32, d->grid[2] = args[3];
		d->block[0] = args[4], d->block[1] = args[4] >> 32, d->block[2] = args[5];
	} else if (f->shape == SHAPE_LAUNCH_DRIVER) {
		d->grid[0] = args[2], d->grid[1] = args[3], d->grid[2] = args[4];
		d->block[0] = args[5], d->block[1] = args[6], d->block[2] = args[7];
	} else {
		bpf_probe_read_user(d->grid, 24, (void *)args[1]); /* grid, then block */
		d->stream = user_word(args[1] + 32);
		d->handle = args[2];
	}
}

INLINE void look(struct details *d, const struct function *f, const u64 args[16])
{
	u64 size[3] = {};

	__builtin_memset(d, 0, sizeof(*d));
	d->direction = f->direction;
	d->memory = f->memory;
	d->count_bytes = f->count ? (s64)(args[MASK(f->count, 15)] * f->scale) : -1;
	if (f->rows)
		d->count_bytes *= args[MASK(f->rows, 15)];
	if (f->stream)
		d->stream = args[MASK(f->stream, 15)];
	if (f->handle)
		d->handle = args[MASK(f->handle, 15)];
	if (f->shape >= SHAPE_COPY && f->shape <= SHAPE_DRIVER_3D) {
		copied(d, f, args);
	} else if (f->shape >= SHAPE_LAUNCH_RUNTIME && f->shape <= SHAPE_LAUNCH_CONFIG) {
		launched(d, f, args);
	} else if ((f->shape >= SHAPE_OUT && f->shape <= SHAPE_CREATE) || f->shape == SHAPE_RETAIN) {
		d->out = args[MASK(f->out, 15)];
		if (f->shape == SHAPE_ALLOC_PITCH) {
			d->pitch_at = args[2];
		} else if (f->shape == SHAPE_ALLOC_3D) {
			extent(args, 2, size);
			d->pitch_at = args[1] + 8;
			d->count_bytes = size[1] * size[2];
		} else if (f->shape == SHAPE_CREATE) { /* CUmemAllocationProp: location.id */
			d->device = half_at(args[3] + 12) + 1;
		}
	} else if (f->shape == SHAPE_REGISTER || f->shape == SHAPE_FREE) {
		d->address = args[1];
	}
}

/* ---- memory held by a process ---- */

INLINE struct balance *balance_of(u32 tgid, s32 device, u8 memory)
{
	struct balance_key key = { .tgid = tgid, .device = device, .memory = memory };
	struct balance *b = entry_of(&balances, &key, &new_balance);

	if (!b)
		count(LOST_ALLOCATION);
	return b;
}

INLINE void holds(u32 tgid, const struct live *l, s64 n)
{
	struct balance *b = balance_of(tgid, l->device, l->memory);
	s64 now;

	if (!b)
		return;
	now = __sync_fetch_and_add(&b->live_bytes, n * (s64)l->n_bytes) + n * (s64)l->n_bytes;
	__sync_fetch_and_add(&b->n_live, n);
	if (now > b->peak_bytes)
		b->peak_bytes = now;
}

INLINE bool is_of_host(u8 memory)
{
	return memory == MEMORY_HOST || memory == MEMORY_REGISTERED;
}

INLINE void allocated(u32 tgid, const struct thread *t, struct details *d, u8 shape)
{
	struct live_key key = { .address = d->address, .tgid = tgid, .is_handle = d->memory == MEMORY_VMM };
	bool is_on_device = d->memory != MEMORY_MANAGED && !is_of_host(d->memory);
	struct live l = { .memory = d->memory, .device = is_on_device ? (d->device ?: t->device) - 1 : -1 }, *old;
	struct balance *b;

	if (shape != SHAPE_REGISTER)
		key.address = user_word(d->out);
	if (d->pitch_at)
		d->count_bytes *= user_word(d->pitch_at);
	d->address = key.address;
	l.n_bytes = d->count_bytes < 0 ? 0 : d->count_bytes;
	if (!key.address)
		return;
	old = bpf_map_lookup_elem(&allocations, &key);
	if (old)
		holds(tgid, old, -1);
	if (bpf_map_update_elem(&allocations, &key, &l, BPF_ANY)) {
		count(LOST_ALLOCATION);
		return;
	}
	holds(tgid, &l, 1);
	b = balance_of(tgid, l.device, l.memory);
	if (b) {
		__sync_fetch_and_add(&b->n_allocs, 1);
		__sync_fetch_and_add(&b->allocated_bytes, l.n_bytes);
	}
	if (is_of_host(d->memory))
		pin(tgid, key.address, l.n_bytes);
}

/* At the entry: after the driver has freed it, another thread may get the same address before this call returns. */
INLINE void frees(u32 tgid, struct details *d)
{
	struct live_key key = { .address = d->address, .tgid = tgid, .is_handle = d->memory == MEMORY_VMM };
	struct live *l = bpf_map_lookup_elem(&allocations, &key);

	if (!l)
		return;
	if (l->n_retained) {
		__sync_fetch_and_add(&l->n_retained, -1);
		d->gives_back = 1;
		return;
	}
	d->freed = *l;
	d->count_bytes = l->n_bytes;
	d->has_freed = 1;
	bpf_map_delete_elem(&allocations, &key);
	holds(tgid, &d->freed, -1);
	if (is_of_host(d->freed.memory))
		unpin(tgid, d->address);
}

INLINE void retained(u32 tgid, u64 handle)
{
	struct live_key key = { .address = handle, .tgid = tgid, .is_handle = 1 };
	struct live *l = bpf_map_lookup_elem(&allocations, &key);

	if (l)
		__sync_fetch_and_add(&l->n_retained, 1);
}

INLINE void freed(u32 tgid, const struct thread *t, struct details *d, bool has_failed)
{
	struct live_key key = { .address = d->address, .tgid = tgid, .is_handle = d->memory == MEMORY_VMM };
	struct balance *b;

	if (d->gives_back) {
		if (has_failed)
			retained(tgid, d->address);
		return;
	}
	if (has_failed && d->has_freed) {
		if (bpf_map_update_elem(&allocations, &key, &d->freed, BPF_ANY))
			count(LOST_ALLOCATION);
		holds(tgid, &d->freed, 1);
		if (is_of_host(d->freed.memory))
			pin(tgid, d->address, d->freed.n_bytes);
	}
	if (has_failed || !d->address)
		return;
	b = d->has_freed ? balance_of(tgid, d->freed.device, d->freed.memory) :
			   balance_of(tgid, is_of_host(d->memory) ? -1 : t->device - 1, d->memory);
	if (b)
		__sync_fetch_and_add(d->has_freed ? &b->n_frees : &b->n_unknown_frees, 1);
}

/* ---- the call has returned ---- */

INLINE u32 log2_bucket(u64 ns)
{
	u64 n = ns >> FIRST_BUCKET_BITS;
	u32 bucket = n ? magnitude(n) + 1 : 0;

	return bucket < N_BUCKETS ? bucket : N_BUCKETS - 1;
}

INLINE void tally(u32 tgid, u64 cookie, const struct details *d, u64 ns, bool has_failed)
{
	struct operation_key key = { .tgid = tgid, .symbol = cookie_symbol(cookie), .direction = d->direction,
				     .host_memory = d->host_memory };
	struct operation *o = entry_of(&operations, &key, &new_operation);
	u64 most;

	if (!o) {
		count(LOST_OPERATION);
		return;
	}
	if (__sync_fetch_and_add(&o->n, 1) == 0) {
		o->first_ns = ns;
	} else {
		for (int i = 0; i < 4; i++) {
			most = LOAD(&o->max_ns);
			if (ns <= most || __sync_val_compare_and_swap(&o->max_ns, most, ns) == most)
				break;
		}
	}
	if (has_failed)
		__sync_fetch_and_add(&o->n_failed, 1);
	__sync_fetch_and_add(&o->total_ns, ns);
	if (d->count_bytes > 0)
		__sync_fetch_and_add(&o->count_bytes, d->count_bytes);
	__sync_fetch_and_add(&o->histogram[MASK(log2_bucket(ns), 31)], 1);
}

/* Whether an error is recorded: not if the same function has just returned the same error to this process. */
INLINE bool is_news(u32 tgid, u64 cookie, s32 result, s64 now)
{
	struct error_key key = { .tgid = tgid, .symbol = cookie_symbol(cookie), .result = result };
	s64 *last = bpf_map_lookup_elem(&errors, &key);

	if (last && now - *last < SAME_ERROR_NS)
		return false;
	bpf_map_update_elem(&errors, &key, &now, BPF_ANY);
	return true;
}

/* Statistics, balances, and a record where the call was slow or has failed. */
INLINE void has_returned(struct pt_regs *ctx, struct thread *t, struct slot *s, struct details *d, const struct frame *f)
{
	u64 cookie = f->cookie, id = bpf_get_current_pid_tgid();
	s64 now = bpf_ktime_get_ns(), ns = now - f->since_ns;
	s32 result = PT_REGS_RC(ctx);
	bool has_failed = result && result != NOT_READY && result != SHUTTING_DOWN;
	u32 tgid = id >> 32;

	if (s)
		s->inside_ns[MASK(d->group, N_GROUPS - 1)] += ns;
	if (d->shape == SHAPE_FREE)
		freed(tgid, t, d, has_failed);
	else if (!has_failed && d->shape >= SHAPE_ALLOC && d->shape <= SHAPE_REGISTER)
		allocated(tgid, t, d, d->shape);
	else if (!has_failed && (d->shape == SHAPE_OUT || d->shape == SHAPE_RETAIN))
		d->handle = user_word(d->out);
	if (!has_failed && d->shape == SHAPE_RETAIN)
		retained(tgid, d->handle);
	if (has_failed && d->pitch_at) /* bytes a row: not in the arguments */
		d->count_bytes = -1;
	tally(tgid, cookie, d, ns, has_failed);
	if (ns < cfg_slow_call_ns && !(has_failed && is_news(tgid, cookie, result, now)))
		return;
	if (!has_failed && ns < cfg_slow_call_ns << raised()) {
		count(RAISED);
		return;
	}
	report_call_with(t, cookie, f->since_ns, ns, result, d);
}

#endif
