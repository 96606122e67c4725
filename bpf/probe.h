/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* The time ledger: the time of the GPU threads of each traced process, in ns per category.
 *
 * One 64-bit word per process holds the state of up to 8 GPU threads, a byte each. Every change is ONE
 * compare-and-swap of that word; the thread whose swap succeeds knows, without any lock, the state of the thread and
 * of the whole process before and after. Accounts are sums of time stamps: leaving state a for b at time t is ns[a] +=
 * t, ns[b] -= t. So an account needs no "since", its updates commute, and all accounts together always sum to now -
 * begin. The process is in the state of its most active GPU thread: the largest byte.
 *
 * Switches can be missed. Programs on a tracepoint do not run in every task: on 6.18 they did not run in the machine's
 * own init, so that a switch from that task to a GPU thread was never reported; elsewhere recursion does the same. A
 * thread that makes a call or leaves the CPU while it counts as off proves a missed switch; the scheduler's own
 * account then has the time of its return (see put_right()). Both are counted.
 */
#ifndef STALLSCOPE_PROBE_H
#define STALLSCOPE_PROBE_H

#include "compat.h"

#define N_PROCESSES 1024
#define NO_SLOT N_SLOTS
#define N_TRIES 16
#define EVICT_AFTER_NS 50000000
#define MOST_WAY_NS 5000 /* longer times include an interrupt */
#define IDLE_AFTER_NS 1000000000ULL /* without a traced call ... */
#define IDLE_SHARE 64 /* ... and on the CPU for less than this share of the time: a thread without work here */
#define MIN_STOLEN_NS 20000
#define WAKING_BYTES 8192

const volatile u8 cfg_never __weak = 0;
const volatile u8 cfg_record_all __weak = 0;
const volatile u8 cfg_only_targets __weak = 0;
const volatile u32 cfg_self __weak = 0;
const volatile s64 cfg_slow_call_ns __weak = 1000000;
const volatile s64 cfg_slow_off_ns __weak = 1000000;

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
	u8 spare[5];
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
	u32 spare;
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

INLINE u32 most_active(u64 word)
{
	u32 most = 0;

#pragma unroll
	for (int i = 0; i < N_SLOTS; i++) {
		u32 state = (word >> 8 * i) & 0xff;

		if (state > most)
			most = state;
	}
	return most;
}

INLINE u32 state_of(const struct slot *s)
{
	if (s->is_idle && s->off && s->off <= CHILD)
		return NONE;
	if (s->off == STOPPED || (s->off == PREEMPTED && !(s->call && s->has_yielded)))
		return s->off;
	return s->call ? s->call : s->off ? s->off : ON_CPU;
}

INLINE void move(struct process *p, u32 from, u32 to, u64 ns)
{
	from = MASK(from, 31);
	to = MASK(to, 31);
	if (from > N_CATEGORIES || to > N_CATEGORIES)
		return;
	__sync_fetch_and_add(&p->ns[from], -ns);
	__sync_fetch_and_add(&p->ns[to], ns);
}

/* Put the slot's byte at `state`. Returns when. The clock is read between the load and the swap, so time stamps are
 * in the order of the swaps. */
INLINE u64 settle(struct process *p, struct slot *s, u32 index, u64 state)
{
	u64 shift = 8 * MASK(index, 7), now = 0, was, will;
	u32 from, to;
	int i;

	__sync_fetch_and_add(&p->begun, 1);
	for (i = 0; i < N_TRIES; i++) {
		was = *(volatile u64 *)&p->word;
		now = bpf_ktime_get_ns();
		will = (was & ~(0xffULL << shift)) | (state << shift);
		if (was == will)
			break;
		if (__sync_val_compare_and_swap(&p->word, was, will) != was)
			continue;
		from = most_active(was);
		to = most_active(will);
		if (from != to)
			move(p, to, from, now);
		break;
	}
	__sync_fetch_and_add(&p->ended, 1);
	if (i == N_TRIES)
		count(LOST_CHANGE);
	return now;
}

/* The process's account of a category at a moment; `active` is the process's state then. */
INLINE u64 account(const struct process *p, u32 category, u32 active, u64 now)
{
	category = MASK(category, 31);
	if (category > N_CATEGORIES)
		return 0;
	return p->ns[category] + (category == active ? now : 0);
}

/* Remember the accounts that a later correction of the interval that begins now needs. */
INLINE void note_bases(struct process *p, struct slot *s, u64 now)
{
	u64 ended = LOAD(&p->ended), word = LOAD(&p->word);
	u32 active = most_active(word);

	s->base_ns = now;
	s->own_base = account(p, state_of(s), active, now);
#pragma unroll
	for (int c = LOCK; c < CHILD; c++)
		s->low_base[c - 1] = account(p, c, active, now);
	s->has_base = LOAD(&p->begun) == ended;
}

/* The part of the process's time in the thread's state that lies after `since`: exact while no other thread of the
 * process was in the same state, otherwise a lower bound. */
INLINE u64 own_time_since(struct process *p, struct slot *s, u64 since, u64 now)
{
	u64 ended = LOAD(&p->ended), word = LOAD(&p->word), before = since - s->base_ns;
	s64 own = account(p, state_of(s), most_active(word), now) - s->own_base;

	if (!s->has_base || LOAD(&p->begun) != ended)
		return 0;
	own -= before;
	if (own <= 0)
		return 0;
	return own < (s64)(now - since) ? own : now - since;
}

/* Correct time afterwards, but no time that an arrival has reported: accounts of arrivals never decrease. */
INLINE void move_untold(struct process *p, u32 from, u32 to, s64 ns, u64 now)
{
	s64 untold = account(p, from, most_active(LOAD(&p->word)), now) - p->told_ns[MASK(from - 1, 15)];

	if (ns > untold)
		ns = untold;
	if (ns > 0)
		move(p, from, to, ns);
}

INLINE u64 clamp(u64 x, u64 low, u64 high)
{
	return x < low ? low : x > high ? high : x;
}

/* A thread that counts as off the CPU runs: its switch-in was missed, and perhaps its wakeup. The scheduler's own
 * accounts of the task have the times: for a thread that left runnable, the growth of its run queue delay; for a
 * thread that left blocked, the growth of its run time, which is exact when it leaves again and otherwise up to 4 ms
 * late. */
INLINE void put_right(struct process *p, struct slot *s, u32 index, struct task_struct *task)
{
	u64 now = bpf_ktime_get_ns(), on = now, woken, ns, delay = 0, runnable = 0;
	u32 was = state_of(s), is;

	if (__sync_val_compare_and_swap(&s->is_mending, 0, 1))
		return;
	count(MISSED_ON);
	if (bpf_core_field_exists(task->sched_info.run_delay))
		delay = task->sched_info.run_delay - s->off_run_delay;
	if (s->woken_ns) {
		on = clamp(s->woken_ns + delay, s->woken_ns, now);
	} else {
		on = clamp(now - (task->se.sum_exec_runtime - s->off_runtime), s->off_ns, now);
		woken = clamp(on - delay, s->off_ns, on);
		count(MISSED_WAKEUP);
		raw(EVENT_WAKEUP, woken, task->tgid, task->pid, 0);
		runnable = own_time_since(p, s, woken, now);
	}
	ns = own_time_since(p, s, on, now);
	s->off = 0;
	is = state_of(s);
	now = settle(p, s, index, is);
	if (was != is)
		move_untold(p, was, is, ns, now);
	if (runnable > ns && !s->call)
		move_untold(p, was, PREEMPTED, runnable - ns, now);
	s->woken_ns = 0;
	s->on_ns = on;
	s->on_runtime = s->off_runtime;
	s->is_mending = 0;
	raw(EVENT_ON, on, task->tgid, task->pid, 0);
}

/* Compare the running time with the scheduler's account of it: time taken by a hypervisor or interrupts counts as
 * preempted. If several threads are in the same state, or a more active thread decides the state of the process, the
 * process has lost nothing. */
INLINE void compare_runtime(struct process *p, struct slot *s, u32 index, struct task_struct *task)
{
	u64 now = bpf_ktime_get_ns(), runtime = task->se.sum_exec_runtime, word = LOAD(&p->word);
	u32 state = word >> 8 * MASK(index, 7) & 0xff, n_same = 0;
	s64 stolen = now - s->on_ns - (runtime - s->on_runtime);
	bool is_known = s->on_ns;

	s->on_ns = now;
	s->on_runtime = runtime;
	if (!is_known || stolen < MIN_STOLEN_NS || state == PREEMPTED || state == STOPPED || state == NONE)
		return;
	count(STOLEN);
#pragma unroll
	for (int i = 0; i < N_SLOTS; i++)
		n_same += (word >> 8 * i & 0xff) == state;
	if (n_same > 1 || most_active(word) != state)
		return;
	move_untold(p, state, PREEMPTED, stolen, now);
	raw(EVENT_OFF, now - stolen, task->tgid, task->pid, PREEMPTED);
	raw(EVENT_ON, now, task->tgid, task->pid, 0);
}

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
		put_right(p, s, index, bpf_get_current_task_btf());
	*slot = s;
	return true;
}

/* The time it took to find the process and the thread. A whole probe takes a fixed multiple of it, with warm or cold
 * caches, on a fast or a slow CPU: so it measures the cost of probes to this thread. */
INLINE u32 way_ns(u64 begin, u64 now)
{
	return now - begin < MOST_WAY_NS ? now - begin : MOST_WAY_NS;
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
				put_right(p, s, index, task);
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

/* Adds the cost of probes to this thread: n is two for a call with its return, one for a call inside it. */
INLINE void count_hit(struct slot *s, u8 group, u32 n)
{
	if (!s)
		return;
	s->way_ns[MASK(group, 3)] += n * s->last_way_ns;
}

INLINE u8 cookie_op(u64 cookie)
{
	return cookie;
}

INLINE u8 cookie_category(u64 cookie)
{
	return cookie >> 8;
}

INLINE u16 cookie_symbol(u64 cookie)
{
	return cookie >> 16;
}

INLINE u8 cookie_action(u64 cookie)
{
	return cookie >> 32;
}

/* ---- open calls ----
 * Only the outermost call counts. The stack grows down, so the stack pointer identifies it, without a depth count that
 * could go wrong. At the same stack pointer a call is a tail call of the open call, or the same call seen by a second
 * link; after the limits below, the open call was left without a return. */

#define SAME_CALL_NS 50000
#define TAIL_CALL_NS 100000000

INLINE bool is_inside(const struct frame *f, u64 sp, u64 cookie, u64 now)
{
	if (!f->sp || sp > f->sp)
		return false;
	if (sp < f->sp)
		return true;
	return now - f->since_ns < (cookie_symbol(f->cookie) == cookie_symbol(cookie) ? SAME_CALL_NS : TAIL_CALL_NS);
}

INLINE void open(struct frame *f, u64 sp, u64 cookie, u64 now)
{
	f->sp = sp;
	f->cookie = cookie;
	f->since_ns = now;
}

INLINE bool is_return_of(const struct frame *f, u64 sp)
{
	return f->sp && sp >= f->sp + POPPED;
}

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, u32);
} no_programs __weak SEC(".maps");

/* Keeps a program on the stack of its thread. From 6.13 on, x86-64 gives programs of this type one stack for each CPU,
 * as if no program could interrupt another. But a program in a probe of a user's function may lose the CPU to another
 * thread that runs the same program, if the kernel preempts in kernel mode, and then reads the other program's data on
 * that stack: this caused an oops on 7.2. A program with a tail call has no such stack (check_max_stack_depth() in
 * kernel/bpf/verifier.c); the call never happens. */
#define ON_STACK_OF_THREAD(ctx) \
	if (cfg_never)          \
	bpf_tail_call(ctx, &no_programs, 0)

/* The programs of a part, for each attach method: one link that covers entry and return (from 6.13 on), or one link
 * for each. enters: true if the return is to be reported. A session has separate functions for entry and return:
 * together their variables do not fit on one stack of 512 bytes. */
#define HOOKS(part, enters, leaves)                          \
	static __attribute__((noinline)) int part##_enters(struct pt_regs *ctx) \
	{                                                    \
		return enters(ctx);                          \
	}                                                    \
	static __attribute__((noinline)) int part##_leaves(struct pt_regs *ctx) \
	{                                                    \
		leaves(ctx);                                 \
		return 0;                                    \
	}                                                    \
	SEC("?uprobe")                                       \
	int part##_session(struct pt_regs *ctx)              \
	{                                                    \
		ON_STACK_OF_THREAD(ctx);                     \
		if (PT_REGS_IP(ctx) == bpf_get_func_ip(ctx)) \
			return !part##_enters(ctx);          \
		return part##_leaves(ctx);                   \
	}                                                    \
	SEC("?uprobe")                                       \
	int part##_enter(struct pt_regs *ctx)                \
	{                                                    \
		ON_STACK_OF_THREAD(ctx);                     \
		enters(ctx);                                 \
		return 0;                                    \
	}                                                    \
	SEC("?uretprobe")                                    \
	int part##_return(struct pt_regs *ctx)               \
	{                                                    \
		ON_STACK_OF_THREAD(ctx);                     \
		leaves(ctx);                                 \
		return 0;                                    \
	}

/* Bit position in the cookie of each argument number. */
#define COUNT_ARG 40
#define DATATYPE_ARG 44
#define REDUCTION_ARG 48
#define PEER_ARG 52
#define COMM_ARG 56
#define STREAM_ARG 60

INLINE u32 arg_number(u64 cookie, u32 at)
{
	return cookie >> at & 15;
}

/* args[1] is the first argument; the stack is read only if the cookie refers to an argument there. */
INLINE void arguments(struct pt_regs *ctx, u64 cookie, u64 args[16])
{
#ifdef __TARGET_ARCH_arm64
	args[1] = ARG(ctx, 1), args[2] = ARG(ctx, 2), args[3] = ARG(ctx, 3), args[4] = ARG(ctx, 4);
	args[5] = ARG(ctx, 5), args[6] = ARG(ctx, 6), args[7] = ARG(ctx, 7), args[8] = ARG(ctx, 8);
#else
	args[1] = PT_REGS_PARM1(ctx), args[2] = PT_REGS_PARM2(ctx), args[3] = PT_REGS_PARM3(ctx);
	args[4] = PT_REGS_PARM4(ctx), args[5] = PT_REGS_PARM5(ctx), args[6] = ctx->r9;
	if (arg_number(cookie, STREAM_ARG) > 6 || arg_number(cookie, COMM_ARG) > 6 || arg_number(cookie, DATATYPE_ARG) > 6)
		bpf_probe_read_user(&args[7], 16, (void *)(PT_REGS_SP(ctx) + 8));
#endif
}

/* `missing` if the call has no such argument. */
INLINE u64 arg(const u64 args[16], u64 cookie, u32 at, u64 missing)
{
	u32 n = arg_number(cookie, at);

	return n ? args[MASK(n, 15)] : missing;
}

#include "native.h"

/* A call has ended: report it. `d`: its arguments, or NULL. */
INLINE void tell_call_with(const struct thread *t, u64 cookie, s64 since, s64 duration, s32 result,
			   const struct details *d)
{
	u64 id = bpf_get_current_pid_tgid(), stack = whole_stack(true); /* emitted before its first event */
	struct call_event *e = event(EVENT_CALL, since, id >> 32, id, LOST_CALL);

	if (!e)
		return;
	e->duration_ns = duration;
	e->stack = stack;
	e->op = cookie_op(cookie);
	e->symbol = cookie_symbol(cookie);
	e->category = cookie_category(cookie);
	e->count_bytes = -1;
	e->result = result;
	e->device = t->device - 1;
	if (d) {
		e->count_bytes = d->count_bytes;
		e->stream = d->stream;
		e->address = d->address;
		e->handle = d->handle;
		__builtin_memcpy(e->grid, d->grid, sizeof(e->grid));
		__builtin_memcpy(e->block, d->block, sizeof(e->block));
		e->direction = d->direction;
		e->host_memory = d->host_memory;
		e->memory = d->memory;
	}
	bpf_ringbuf_submit(e, wakeup(&events));
}

/* A call has ended: report it if it was slow, or failed. */
INLINE void tell_call(const struct thread *t, u64 cookie, s64 since, s32 result, bool has_failed)
{
	s64 duration = bpf_ktime_get_ns() - since;

	if (!has_failed && duration < cfg_slow_call_ns << raised())
		return;
	tell_call_with(t, cookie, since, duration, result, NULL);
}

#endif
