/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* The rings and counters through which the programs report to user space, and the settings that user space makes.
 *
 * A record that finds no room is counted by its kind. */
#ifndef STALLSCOPE_RING_H
#define STALLSCOPE_RING_H

#include "compat.h"

#define WAKING_BYTES 8192

const volatile u8 cfg_never __weak = 0;
const volatile u8 cfg_record_all __weak = 0;
const volatile u8 cfg_only_targets __weak = 0;
const volatile u32 cfg_self __weak = 0;
const volatile s64 cfg_slow_call_ns __weak = 1000000;
const volatile s64 cfg_slow_off_ns __weak = 1000000;

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4 << 20);
} arrivals __weak SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4 << 20);
} events __weak SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, N_COUNTERS);
	__type(key, u32);
	__type(value, u64);
} counters __weak SEC(".maps");

struct tuning { /* settings that user space changes while tracing */
	u32 raised; /* thresholds of calls are doubled this many times */
	u32 closed_groups; /* bit i: functions of group i open no calls: their probes are, or will be, detached */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct tuning);
} tuning __weak SEC(".maps");

INLINE u64 user_word(u64 address)
{
	u64 value = 0;

	bpf_probe_read_user(&value, sizeof(value), (void *)address);
	return value;
}

/* The highest bit of a number that is not 0; 31 for all from 2^31 on. */
INLINE u32 magnitude(u64 value)
{
	u32 n = 0;

#pragma unroll
	for (int shift = 16; shift; shift >>= 1) {
		if (value >> shift) {
			value >>= shift;
			n += shift;
		}
	}
	return n;
}

INLINE u32 raised(void)
{
	u32 zero = 0;
	struct tuning *t = bpf_map_lookup_elem(&tuning, &zero);

	return t ? MASK(t->raised, 15) : 0;
}

INLINE bool is_closed(u8 group)
{
	u32 zero = 0;
	struct tuning *t = bpf_map_lookup_elem(&tuning, &zero);

	return t && t->closed_groups >> MASK(group, N_GROUPS - 1) & 1;
}

INLINE void count(u32 which)
{
	u64 *n = bpf_map_lookup_elem(&counters, &which);

	if (n)
		*n += 1; /* per CPU; a probe that is preempted between load and store may lose an increment */
}

/* The entry of a hash map, created if missing; NULL: no room. */
INLINE void *entry_of(void *map, const void *key, const void *fresh)
{
	void *entry = bpf_map_lookup_elem(map, key);

	if (entry)
		return entry;
	bpf_map_update_elem(map, key, fresh, BPF_NOEXIST);
	return bpf_map_lookup_elem(map, key);
}

/* Flags for a record of a ring: the reader polls, and is woken when a quarter of the ring is in use. Several records
 * request that, because records made at the same time may skip the exact position. */
INLINE u64 wakeup(void *ring)
{
	u64 limit = bpf_ringbuf_query(ring, BPF_RB_RING_SIZE) / 4;

	return bpf_ringbuf_query(ring, BPF_RB_AVAIL_DATA) - limit < WAKING_BYTES ? BPF_RB_FORCE_WAKEUP
									 : BPF_RB_NO_WAKEUP;
}

/* A zeroed record for the event ring, or NULL: counted. */
INLINE void *event(u16 kind, s64 ts_ns, u32 pid, u32 tid, u32 lost)
{
	struct event *e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);

	if (!e) {
		count(lost);
		return NULL;
	}
	__builtin_memset(e, 0, sizeof(*e));
	e->kind = kind;
	e->ts_ns = ts_ns;
	e->pid = pid;
	e->tid = tid;
	return e;
}

INLINE void raw(u16 kind, s64 ts_ns, u32 pid, u32 tid, u8 category)
{
	struct raw_event *e;

	if (!cfg_record_all)
		return;
	e = event(kind, ts_ns, pid, tid, LOST_RAW);
	if (!e)
		return;
	e->category = category;
	bpf_ringbuf_submit(e, wakeup(&events));
}

#endif
