// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* The scheduler's side of the ledger: when GPU threads leave the CPU, why, which task wakes them, when they run again.
 * A task that is not followed costs a load and a branch, as long as no other program gave it task storage. */
#include "arrival.h"
#include "host.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* So that the object contains the types of its records, and the loader can compare. */
const volatile struct {
	u64 n_bytes; /* of a record in the event ring */
	struct event event[0];
	struct call_event call_event[0];
	struct off_event off_event[0];
	struct life_event life_event[0];
	struct raw_event raw_event[0];
	struct native native[0];
} layouts = { .n_bytes = sizeof(struct event) };

#define STATE_INTERRUPTIBLE 1
#define STATE_STOPPED_OR_TRACED 0xc
#define JOBCTL_TRAP_FREEZE (1 << 23) /* frozen by its cgroup (v2) */
#define BY_EXCEPTION (-1)	     /* in place of a system call number: it was in user mode */
#define N_SYSCALLS 512
#define N_ANCESTORS 4

/* The object that a thread blocked in this system call waits for. One table for both architectures: numbers come from
 * asm/unistd.h. src/stallscope/events/syscalls.py has the same for x86-64; a test compares them. */
static const u8 blocked_in[N_SYSCALLS] = {
	[__NR_futex] = LOCK,
	[__NR_futex_waitv] = LOCK,
	[__NR_nanosleep] = SLEEP,
	[__NR_clock_nanosleep] = SLEEP,
	[__NR_ioctl] = DRIVER,
	[__NR_pselect6] = NET,
	[__NR_ppoll] = NET,
	[__NR_epoll_pwait] = NET,
	[__NR_epoll_pwait2] = NET,
	[__NR_connect] = NET,
	[__NR_accept] = NET,
	[__NR_accept4] = NET,
	[__NR_sendto] = NET,
	[__NR_recvfrom] = NET,
	[__NR_sendmsg] = NET,
	[__NR_recvmsg] = NET,
	[__NR_recvmmsg] = NET,
	[__NR_sendmmsg] = NET,
	[__NR_read] = IO,
	[__NR_write] = IO,
	[__NR_pread64] = IO,
	[__NR_pwrite64] = IO,
	[__NR_readv] = IO,
	[__NR_writev] = IO,
	[__NR_preadv] = IO,
	[__NR_pwritev] = IO,
	[__NR_preadv2] = IO,
	[__NR_pwritev2] = IO,
	[__NR_close] = IO,
	[__NR_openat] = IO,
	[__NR_fsync] = IO,
	[__NR_fdatasync] = IO,
	[__NR_sync] = IO,
	[__NR_syncfs] = IO,
	[__NR_sync_file_range] = IO,
	[__NR_sendfile] = IO,
	[__NR_splice] = IO,
	[__NR_copy_file_range] = IO,
	[__NR_ftruncate] = IO,
	[__NR_fallocate] = IO,
	[__NR_unlinkat] = IO,
	[__NR_renameat2] = IO,
	[__NR_io_getevents] = IO,
	[__NR_io_pgetevents] = IO,
	[__NR_io_uring_enter] = IO,
	[__NR_getdents64] = IO,
	[__NR_statx] = IO,
	[__NR_newfstatat] = IO,
	[__NR_mmap] = FAULT,
	[__NR_mprotect] = FAULT,
	[__NR_munmap] = FAULT,
	[__NR_madvise] = FAULT,
	[__NR_mremap] = FAULT,
	[__NR_msync] = FAULT,
#ifdef __NR_poll
	[__NR_poll] = NET,
	[__NR_select] = NET,
	[__NR_epoll_wait] = NET,
	[__NR_open] = IO,
	[__NR_stat] = IO,
	[__NR_fstat] = IO,
	[__NR_lstat] = IO,
	[__NR_readlink] = IO,
	[__NR_rename] = IO,
	[__NR_unlink] = IO,
#endif
};

/* A poll or select that watches no descriptor is a sleep. */
INLINE bool watches_nothing(int nr, struct pt_regs___kernel *regs)
{
	switch (nr) {
#ifdef __NR_poll
	case __NR_poll:
#endif
	case __NR_ppoll:
		return SYSCALL_ARG2(regs) == 0;
#ifdef __NR_select
	case __NR_select:
#endif
	case __NR_pselect6:
		return SYSCALL_ARG1(regs) == 0;
	}
	return false;
}

/* On a pipe, socket or terminal these wait interruptibly, on a disk they don't. */
INLINE bool is_stream_call(int nr)
{
	return nr == __NR_read || nr == __NR_write || nr == __NR_readv || nr == __NR_writev;
}

INLINE u32 why_off(struct task_struct *task, struct slot *s, bool preempt, u32 state, struct pt_regs___kernel *regs)
{
	int nr = SYSCALL_NR(regs);
	u32 category;

	s->syscall_nr = nr;
	s->has_yielded = !preempt && !state && nr == __NR_sched_yield;
	s->off_flags = 0;
	if (preempt || !state) {
		s->off_flags = OFF_PREEMPTED;
		return PREEMPTED;
	}
	if (state & STATE_STOPPED_OR_TRACED || task->jobctl & JOBCTL_TRAP_FREEZE)
		return STOPPED;
	if (BPF_CORE_READ_BITFIELD(task, in_iowait)) {
		s->off_flags = OFF_IOWAIT;
		return IO;
	}
	if (nr == BY_EXCEPTION)
		return FAULT;
	if (nr == __NR_restart_syscall) /* a sleep, poll or futex with timeout that goes on after a stop */
		return s->blocked ? s->blocked : OTHER_OFF;
	if (nr < 0 || nr >= N_SYSCALLS)
		return OTHER_OFF;
	category = blocked_in[MASK(nr, N_SYSCALLS - 1)];
	if (category == IO && state & STATE_INTERRUPTIBLE && is_stream_call(nr))
		return NET;
	if (category == NET && watches_nothing(nr, regs))
		return SLEEP;
	return category ? category : OTHER_OFF;
}

/* A thread that once made CUDA calls (NCCL's own threads do at start) and now only wakes from a poll from time to time
 * does not delay other threads. The main thread is never idle, and neither is a thread that works between its calls. */
INLINE bool is_idle(const struct slot *s, struct task_struct *task, u32 off, u64 now)
{
	u64 since = now - s->last_hook_ns;

	if (off > CHILD || s->call || task->pid == task->tgid || since < IDLE_AFTER_NS)
		return false;
	return (task->se.sum_exec_runtime - s->hook_runtime) * IDLE_SHARE < since;
}

/* The Python location of a thread that blocks outside of calls, which report theirs. At an exception it may be
 * anywhere, also in the middle of changing its frames. If a thread blocks in every step, walks take WALK_SHARE of its
 * time. */
INLINE void note_stack(struct slot *s, struct task_struct *task, u32 off, u64 now)
{
	u64 place, took;

	if (off == PREEMPTED) /* after a block it is still the same */
		return;
	s->stack = 0;
	if (s->call || off == STOPPED || s->syscall_nr < 0 || now - s->walked_ns < WALK_APART_NS)
		return;
	place = place_of(task);
	if (place == s->walked_at && now - s->walked_ns < s->walk_apart_ns)
		return;
	s->stack = whole_stack(false);
	took = bpf_ktime_get_ns() - now;
	s->walked_ns = now;
	s->walked_at = place;
	s->walk_apart_ns = WALK_SHARE * (took < MAX_WALK_NS ? took : MAX_WALK_NS);
}

INLINE void leaves_cpu(struct process *p, struct slot *s, u32 index, bool preempt, struct task_struct *task,
		       struct task_struct *next, u32 state)
{
	u64 now;
	u32 off;

	if (s->off)
		repair_missed_switch(p, s, index, task);
	compare_runtime(p, s, index, task);
	off = why_off(task, s, preempt, state, (struct pt_regs___kernel *)bpf_task_pt_regs(task));
	if (off != PREEMPTED && off != STOPPED)
		s->blocked = off;
	s->off = off;
	s->off_category = off;
	s->is_idle = is_idle(s, task, off, bpf_ktime_get_ns());
	s->off_runtime = task->se.sum_exec_runtime;
	if (bpf_core_field_exists(task->sched_info.run_delay))
		s->off_run_delay = task->sched_info.run_delay;
	s->by_pid = -1;
	if (off == PREEMPTED) {
		s->off_flags |= is_throttled(task) ? OFF_THROTTLED : 0;
		s->by_pid = next->tgid;
		bpf_probe_read_kernel(s->by_comm, sizeof(s->by_comm), next->comm);
	}
	now = settle(p, s, index, state_of(s));
	s->off_ns = now;
	note_stack(s, task, off, now);
	s->woken_ns = off == PREEMPTED ? now : 0;
	note_bases(p, s, now);
	if (cfg_record_all) {
		struct raw_event *e = event(EVENT_OFF, now, task->tgid, task->pid, LOST_RAW);

		if (e) {
			e->category = off == PREEMPTED && s->call && s->has_yielded ? s->call : off;
			if (s->is_idle)
				e->category = NONE;
			e->flags = s->off_flags;
			e->syscall_nr = s->syscall_nr;
			e->state = state;
			bpf_ringbuf_submit(e, wakeup(&events));
		}
	}
}

/* Calls whose first argument is a descriptor of the file or socket that they wait for. */
static const bool takes_descriptor[N_SYSCALLS] = {
	[__NR_read] = true,
	[__NR_write] = true,
	[__NR_pread64] = true,
	[__NR_pwrite64] = true,
	[__NR_readv] = true,
	[__NR_writev] = true,
	[__NR_preadv] = true,
	[__NR_pwritev] = true,
	[__NR_preadv2] = true,
	[__NR_pwritev2] = true,
	[__NR_close] = true,
	[__NR_fsync] = true,
	[__NR_fdatasync] = true,
	[__NR_syncfs] = true,
	[__NR_sync_file_range] = true,
	[__NR_sendfile] = true,
	[__NR_splice] = true,
	[__NR_copy_file_range] = true,
	[__NR_ftruncate] = true,
	[__NR_fallocate] = true,
	[__NR_getdents64] = true,
	[__NR_connect] = true,
	[__NR_accept] = true,
	[__NR_accept4] = true,
	[__NR_sendto] = true,
	[__NR_recvfrom] = true,
	[__NR_sendmsg] = true,
	[__NR_recvmsg] = true,
	[__NR_recvmmsg] = true,
	[__NR_sendmmsg] = true,
};

INLINE bool is_about_descriptor(int nr)
{
	return nr >= 0 && nr < N_SYSCALLS && takes_descriptor[MASK(nr, N_SYSCALLS - 1)];
}

INLINE void tell_off_cpu(struct slot *s, struct task_struct *task, u64 now)
{
	struct pt_regs___kernel *regs = (struct pt_regs___kernel *)bpf_task_pt_regs(task);
	struct off_event *e = event(EVENT_OFF_CPU, s->off_ns, task->tgid, s->tid, LOST_OFF_CPU);

	if (!e)
		return;
	e->duration_ns = now - s->off_ns;
	e->stack = s->off_flags & OFF_PREEMPTED ? 0 : s->stack;
	e->category = s->off_category;
	e->flags = s->off_flags | s->waker_flags;
	e->runnable_ns = s->woken_ns ? now - s->woken_ns : -1;
	e->syscall_nr = s->syscall_nr;
	e->waker_pid = s->waker_pid;
	e->waker_tid = s->waker_tid;
	e->by_pid = s->by_pid;
	if (s->by_pid >= 0)
		__builtin_memcpy(e->by_comm, s->by_comm, sizeof(e->by_comm));
	e->fd = -1;
	if ((s->off_category == IO || s->off_category == NET) && is_about_descriptor(SYSCALL_NR(regs)))
		tell_file(e, task, SYSCALL_ARG1(regs));
	bpf_ringbuf_submit(e, wakeup(&events));
}

INLINE void runs_again(struct process *p, struct slot *s, u32 index, struct task_struct *task)
{
	bool was_call = s->call && s->off_category != PREEMPTED && s->off_category != STOPPED;
	u64 now;

	if (s->off && !s->woken_ns) /* its time in the run queue stays in the category that it was blocked in */
		count(MISSED_WAKEUP);
	s->off = 0;
	now = settle(p, s, index, state_of(s));
	s->on_ns = now;
	s->on_runtime = task->se.sum_exec_runtime;
	raw(EVENT_ON, now, task->tgid, task->pid, 0);
	if (s->off_ns && now - s->off_ns >= cfg_slow_off_ns && !was_call)
		tell_off_cpu(s, task, now);
	s->off_ns = 0;
	s->waker_pid = s->waker_tid = -1;
	s->waker_flags = 0;
}

INLINE int switched(bool preempt, struct task_struct *prev, struct task_struct *next, u32 prev_state)
{
	struct process *p;
	struct slot *s;
	u64 begin;
	u32 index;

	s = slot_of(prev, &p, &index);
	if (s) {
		begin = bpf_ktime_get_ns();
		leaves_cpu(p, s, index, preempt, prev, next, prev_state);
		s->scheduler_ns += bpf_ktime_get_ns() - begin;
	}
	s = slot_of(next, &p, &index);
	if (s) {
		begin = bpf_ktime_get_ns();
		runs_again(p, s, index, next);
		s->scheduler_ns += bpf_ktime_get_ns() - begin;
	}
	return 0;
}

SEC("?tp_btf/sched_switch")
int BPF_PROG(on_switch, bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state)
{
	return switched(preempt, prev, next, prev_state);
}

/* Before 5.18 the tracepoint does not have the state (commit fa2c3254d7cf); the state of the task may have changed
 * since. */
struct task_struct___state {
	unsigned int __state;
} CORE;

SEC("?tp_btf/sched_switch")
int BPF_PROG(on_switch_5_15, bool preempt, struct task_struct *prev, struct task_struct *next)
{
	return switched(preempt, prev, next, ((struct task_struct___state *)prev)->__state);
}

/* Whether `current` is a child, grandchild ... of the process. */
INLINE bool is_descendant(struct task_struct *task, int tgid)
{
#pragma unroll
	for (int i = 0; i < N_ANCESTORS; i++) {
		task = task->real_parent;
		if (!task)
			return false;
		if (task->tgid == tgid)
			return true;
	}
	return false;
}

/* The waker of the thread: `current`, unless this runs in an interrupt. This can run before the switch away is
 * complete, so it must not change any state. */
SEC("?tp_btf/sched_waking")
int BPF_PROG(on_waking, struct task_struct *task)
{
	struct task_struct *waker;
	struct process *p;
	struct slot *s;
	u32 index;

	s = slot_of(task, &p, &index);
	if (!s)
		return 0;
	s->waker_flags = 0;
	s->waker_pid = s->waker_tid = -1;
	waker = bpf_get_current_task_btf();
	if (in_interrupt(waker))
		return 0;
	s->waker_pid = waker->tgid;
	s->waker_tid = waker->pid;
	if (waker->tgid == task->tgid)
		s->waker_flags = OFF_WOKEN_BY_SELF;
	else if (is_descendant(waker, task->tgid))
		s->waker_flags = OFF_WOKEN_BY_CHILD;
	return 0;
}

/* The thread waited for a child: the process's time below CHILD during the wait is CHILD. Exact, except for accounts
 * that an arrival of another thread has already reported. */
INLINE void waited_for_child(struct process *p, struct slot *s, u64 now)
{
	u64 ended = LOAD(&p->ended), word = LOAD(&p->word), base;
	u32 active = most_active(word);
	s64 spent[CHILD];

	if (!s->has_base)
		return;
#pragma unroll
	for (int c = LOCK; c < CHILD; c++) {
		base = s->low_base[c - 1];
		if ((s64)(p->reported_ns[c - 1] - base) > 0)
			base = p->reported_ns[c - 1];
		spent[c] = account(p, c, active, now) - base;
	}
	if (LOAD(&p->begun) != ended)
		return;
#pragma unroll
	for (int c = LOCK; c < CHILD; c++)
		if (spent[c] > 0 && spent[c] <= (s64)(now - s->off_ns))
			move(p, c, CHILD, spent[c]);
}

SEC("?tp_btf/sched_wakeup")
int BPF_PROG(on_wakeup, struct task_struct *task)
{
	struct process *p;
	struct slot *s;
	bool waited;
	u32 index;
	u64 now;

	s = slot_of(task, &p, &index);
	if (!s || !s->off || s->off == PREEMPTED)
		return 0;
	waited = s->waker_flags & OFF_WOKEN_BY_CHILD && !s->call && s->off < CHILD && s->off != SLEEP;
	s->off = PREEMPTED;
	if (is_throttled(task))
		s->off_flags |= OFF_THROTTLED;
	now = settle(p, s, index, state_of(s));
	if (waited) {
		s->off_category = CHILD;
		waited_for_child(p, s, now);
	}
	s->woken_ns = now;
	note_bases(p, s, now);
	raw(EVENT_WAKEUP, now, task->tgid, task->pid, waited ? CHILD : 0);
	return 0;
}

#define PF_EXITING 0x4 /* include/linux/sched.h: on_exit() has removed the process, or does so soon */
#define COMPARE_BITS 22 /* of ns on the CPU: 4.2 ms, a tick of most kernels */

/* The scheduler updates its account of the running task: at every tick, at each switch, and in between. */
SEC("?tp_btf/sched_stat_runtime")
int BPF_PROG(on_tick, struct task_struct *task, u64 grown_ns)
{
	u64 runtime = task->se.sum_exec_runtime;
	struct process *p;
	struct slot *s;
	u32 index;

	if (runtime >> COMPARE_BITS == (runtime - grown_ns) >> COMPARE_BITS)
		return 0;
	if (task->pid != (u32)bpf_get_current_pid_tgid())
		return 0;
	s = slot_of(task, &p, &index);
	if (!s) {
		if (is_engine() && !(task->flags & PF_EXITING)) /* it computes, and makes no traced call */
			follow_thread();
		return 0;
	}
	if (s->off)
		repair_missed_switch(p, s, index, task);
	compare_runtime(p, s, index, task);
	return 0;
}

INLINE void life(u16 kind, struct task_struct *task)
{
	struct life_event *e = event(kind, bpf_ktime_get_ns(), task->tgid, task->pid, LOST_LIFE);

	if (!e)
		return;
	bpf_probe_read_kernel(e->name, sizeof(e->name), task->comm);
	bpf_ringbuf_submit(e, wakeup(&events));
}

SEC("?tp_btf/sched_process_exit")
int BPF_PROG(on_exit, struct task_struct *task)
{
	u32 index, tgid = task->tgid;
	struct process *p;
	struct slot *s;
	u64 now;

	s = slot_of(task, &p, &index);
	if (s) {
		if (s->off)
			repair_missed_switch(p, s, index, task);
		now = settle(p, s, index, NONE);
		raw(EVENT_DEAD, now, tgid, task->pid, 0);
		__sync_val_compare_and_swap(&s->tid, (u32)task->pid, 0);
	}
	if (task->signal->live.counter == 0 && bpf_map_lookup_elem(&processes, &tgid)) {
		life(EVENT_EXIT, task);
		bpf_map_delete_elem(&processes, &tgid);
		forget_comms(tgid);
	}
	return 0;
}

/* Another program in the same process: its handles and threads are invalid. */
SEC("?tp_btf/sched_process_exec")
int BPF_PROG(on_exec, struct task_struct *task)
{
	u32 tgid = task->tgid;

	if (bpf_map_lookup_elem(&processes, &tgid)) {
		life(EVENT_EXEC, task);
		bpf_map_delete_elem(&processes, &tgid);
		forget_comms(tgid);
	}
	return 0;
}
