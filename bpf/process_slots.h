/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* The traced processes and their GPU threads: a thread gets one of the process's slots at its first call. */
#ifndef STALLSCOPE_PROCESS_SLOTS_H
#define STALLSCOPE_PROCESS_SLOTS_H

#include "ledger.h"

#define N_PROCESSES 1024
#define NO_SLOT N_SLOTS
#define EVICT_AFTER_NS 50000000
#define MAX_ENTRY_COST_NS 5000 /* longer times include an interrupt */
#define IDLE_AFTER_NS 1000000000ULL /* without a traced call ... */
#define IDLE_SHARE 64 /* ... and on the CPU for less than this share of the time: a thread without work here */

struct frame { /* an outermost call that is open */
	u64 sp;
	s64 since_ns;
	u64 cookie;
};

struct made_comm { /* facts known at the entry of a call that makes a communicator */
	u64 out; /* address of the handle */
	u64 hash;
	u64 parent_hash;
	u64 devices;
	s32 rank;
	s32 nranks;
	s32 parent_rank;
	s32 parent_nranks;
	s32 color;
	s32 key;
	s32 n_splits;
	s32 spare;
};

struct live { /* an allocation that was not freed */
	u64 n_bytes;
	s16 device;
	u16 memory;
	u32 n_retained; /* releases of its handle that free nothing yet */
};

#define N_PINNED 128

struct range {
	u64 begin;
	u64 end;
};

struct pinned { /* host memory of a process that is pinned */
	u32 n_used;	/* beyond these the ranges are empty */
	u8 is_whole;	/* seen since the process set CUDA up */
	u8 is_partial;	/* there was no room for some */
	u16 spare;
	struct range ranges[N_PINNED];
};

struct details { /* arguments of an open CUDA call */
	s64 count_bytes; /* -1 unknown */
	u64 stream;
	u64 address;
	u64 source;
	u64 handle;
	u64 out;	/* where the call writes its result */
	u64 pitch_at;	/* where it writes bytes a row */
	struct live freed;
	u32 grid[3];
	u32 block[3];
	s32 device;	/* + 1 */
	u8 direction;
	u8 host_memory;
	u8 memory;
	u8 shape;
	u8 group;
	u8 has_freed;
	u8 gives_back; /* one of several handles */
	u8 has_driver_wait; /* a synchronise call of the driver inside */
	u8 spare[4];
};

struct thread { /* facts for a GPU thread's own probes; its slot is the part for other threads */
	s64 born_ns; /* of the process that the slot belongs to */
	u32 slot;
	s32 device; /* + 1; 0 unknown */
	u32 group_depth;
	u32 taken; /* a number goes through here so that the verifier does not follow each of its values */
	u32 n_refused; /* times that there was no slot */
	u32 spare;
	struct frame nccl;
	struct frame class;
	struct frame graph;
	struct frame counted;
	struct details class_details;
	struct details counted_details;
	u64 graph_out; /* address of the handle of the open call's result */
	u64 graph_stream;
	s64 graph_capture_ns;
	struct made_comm made;
	struct arrival arrival; /* for a call that makes one object for several threads */
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct thread);
} threads __weak SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, N_PROCESSES);
	__type(key, u32);
	__type(value, struct process);
} processes __weak SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, N_PROCESSES);
	__type(key, u32);
	__type(value, u8);
} targets __weak SEC(".maps");

/* The slot of a task that is followed, otherwise NULL. */
INLINE struct slot *slot_of(struct task_struct *task, struct process **process, u32 *index)
{
	struct thread *t;
	struct process *p;
	struct slot *s;
	u32 tgid;

	if (!task->bpf_storage)
		return NULL;
	t = bpf_task_storage_get(&threads, task, 0, 0);
	if (!t || t->slot >= N_SLOTS)
		return NULL;
	tgid = task->tgid;
	p = bpf_map_lookup_elem(&processes, &tgid);
	if (!p || p->born_ns != t->born_ns)
		return NULL;
	*index = MASK(t->slot, 7);
	s = &p->slots[*index];
	if (s->tid != task->pid)
		return NULL;
	*process = p;
	return s;
}

INLINE bool is_wanted(u32 tgid)
{
	if (tgid == cfg_self)
		return false;
	return !cfg_only_targets || bpf_map_lookup_elem(&targets, &tgid);
}

static const struct process new_process;

INLINE struct process *process_of(u32 tgid)
{
	struct process *p = bpf_map_lookup_elem(&processes, &tgid);
	struct life_event *e;
	s64 now;

	if (p)
		return p;
	bpf_map_update_elem(&processes, &tgid, &new_process, BPF_NOEXIST);
	p = bpf_map_lookup_elem(&processes, &tgid);
	if (!p) {
		count(LOST_PROCESS);
		return NULL;
	}
	now = bpf_ktime_get_ns();
	if (__sync_val_compare_and_swap(&p->born_ns, 0, now) == 0) {
		e = event(EVENT_PROCESS, now, tgid, bpf_get_current_pid_tgid(), LOST_LIFE);
		if (e) {
			bpf_get_current_comm(e->name, sizeof(e->name));
			bpf_ringbuf_submit(e, wakeup(&events));
		}
	}
	return p;
}

/* A slot of a thread that has been parked for long and is not in a call; NO_SLOT without such a slot. */
INLINE u32 parked_slot(struct process *p, u64 now)
{
	u64 word = *(volatile u64 *)&p->word;
	u32 found = NO_SLOT;

	for (u32 i = 0; i < N_SLOTS; i++) {
		struct slot *s = &p->slots[MASK(i, 7)];

		if ((word >> 8 * i & 0xff) <= NET && !s->call && now - s->last_hook_ns > EVICT_AFTER_NS)
			found = i;
	}
	return found;
}

/* Take a free slot, otherwise the slot of a thread that has been parked for long. NO_SLOT without either. */
INLINE u32 take_slot(struct process *p, u32 tid, u64 now)
{
	struct slot *s;
	u32 old, i;
	u64 ts;

	for (i = 0; i < N_SLOTS; i++)
		if (!__sync_val_compare_and_swap(&p->slots[MASK(i, 7)].tid, 0, tid))
			return i;
	i = parked_slot(p, now);
	if (i >= N_SLOTS)
		return NO_SLOT;
	s = &p->slots[MASK(i, 7)];
	old = s->tid;
	if (__sync_val_compare_and_swap(&s->tid, old, tid) != old)
		return NO_SLOT;
	ts = settle(p, s, i, NONE);
	raw(EVENT_DEAD, ts, bpf_get_current_pid_tgid() >> 32, old, 0);
	return i;
}

/* The calling thread in a call that returns: its state from the entry. False: it was not traced then. */
INLINE bool self_again(struct thread *t, struct process **process, struct slot **slot)
{
	u64 id = bpf_get_current_pid_tgid();
	u32 index = t->slot, tgid = id >> 32;
	struct process *p = bpf_map_lookup_elem(&processes, &tgid);
	struct slot *s;

	*slot = NULL;
	if (!p || t->born_ns != p->born_ns)
		return false;
	*process = p;
	if (index >= N_SLOTS)
		return true;
	s = &p->slots[MASK(index, 7)];
	if (s->tid != (u32)id)
		return true;
	if (s->off)
		repair_missed_switch(p, s, index, bpf_get_current_task_btf());
	*slot = s;
	return true;
}

/* The time it took to find the process and the thread. A whole probe takes a fixed multiple of it, with warm or cold
 * caches, on a fast or a slow CPU: so it measures the cost of probes to this thread. */
INLINE u32 way_ns(u64 begin, u64 now)
{
	return now - begin < MAX_ENTRY_COST_NS ? now - begin : MAX_ENTRY_COST_NS;
}

/* The calling thread, its process and, if there was room, its slot; created at the first call. False: not to be
 * traced. */
INLINE bool self(struct thread **thread, struct process **process, struct slot **slot, u64 *now_ns)
{
	u64 id = bpf_get_current_pid_tgid(), begin = bpf_ktime_get_ns(), now;
	struct task_struct *task = bpf_get_current_task_btf();
	struct process *p;
	struct thread *t;
	struct slot *s;
	u32 index;

	*slot = NULL;
	if (!is_wanted(id >> 32))
		return false;
	p = process_of(id >> 32);
	t = bpf_task_storage_get(&threads, task, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!p || !t)
		return false;
	*process = p;
	*thread = t;
	*now_ns = now = bpf_ktime_get_ns();
	index = t->slot;
	if (t->born_ns == p->born_ns && index < N_SLOTS) {
		s = &p->slots[MASK(index, 7)];
		if (s->tid == (u32)id) {
			if (s->off)
				repair_missed_switch(p, s, index, task);
			s->last_hook_ns = now;
			s->last_way_ns = way_ns(begin, now);
			s->hook_runtime = task->se.sum_exec_runtime;
			s->is_idle = 0;
			*slot = s;
			return true;
		}
	}
	if (t->born_ns != p->born_ns) { /* its first call in this program */
		t->nccl.sp = t->class.sp = t->graph.sp = t->counted.sp = 0;
		t->device = 0;
		t->group_depth = 0;
		t->n_refused = 0;
	}
	t->slot = NO_SLOT;
	t->born_ns = p->born_ns;
	*(volatile u32 *)&t->taken = take_slot(p, id, now);
	index = *(volatile u32 *)&t->taken;
	if (index >= N_SLOTS) {
		if (!t->n_refused++)
			count(LOST_THREAD);
		__sync_fetch_and_add(&p->n_lost, 1);
		return true;
	}
	s = &p->slots[MASK(index, 7)];
	s->call = s->off = s->blocked = s->waker_flags = 0;
	s->class_op = s->nccl_op = 0;
	s->syscall_nr = -1;
	s->waker_pid = s->waker_tid = s->by_pid = -1;
	s->off_runtime = s->off_run_delay = s->on_runtime = 0;
	s->on_ns = 0;
	s->is_mending = 0;
	s->has_yielded = s->has_base = 0;
	s->scheduler_ns = 0;
	__builtin_memset(s->way_ns, 0, sizeof(s->way_ns));
	__builtin_memset(s->inside_ns, 0, sizeof(s->inside_ns));
	s->woken_ns = s->off_ns = 0;
	s->last_hook_ns = now;
	s->last_way_ns = way_ns(begin, now);
	s->hook_runtime = task->se.sum_exec_runtime;
	s->is_idle = 0;
	asm volatile("" ::: "memory"); /* the slot last: until then the scheduler's side leaves the thread alone */
	t->slot = index;
	*now_ns = now = settle(p, s, index, ON_CPU);
	raw(EVENT_BORN, now, id >> 32, id, 0);
	*slot = s;
	return true;
}

#define N_ENGINES 1024

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, N_ENGINES);
	__type(key, u32);
	__type(value, u8);
} engines __weak SEC(".maps"); /* processes of inference engines */

INLINE bool is_engine(void)
{
	u32 tgid = bpf_get_current_pid_tgid() >> 32;

	return bpf_map_lookup_elem(&engines, &tgid);
}

/* From now on the ledger follows the calling thread, if there is room. */
INLINE void follow_thread(void)
{
	struct process *p;
	struct thread *t;
	struct slot *s;
	u64 now;

	self(&t, &p, &s, &now);
}

/* Adds the cost of probes to this thread: n is two for a call with its return, one for a call inside it. */
INLINE void count_hit(struct slot *s, u8 group, u32 n)
{
	if (!s)
		return;
	s->way_ns[MASK(group, N_GROUPS - 1)] += n * s->last_way_ns;
}

#endif
