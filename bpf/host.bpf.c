// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/* Events of the machine that affect the traced processes, in addition to the scheduler's events: disks, memory,
 * signals, exits, connections. The loader may leave out any of these programs. */
#include "host.h"

const volatile s64 cfg_slow_stall_ns __weak = 1000000;

const volatile struct {
	u64 n_bytes;
	struct host_event host_event[0];
	struct ends ends[0];
	struct host_sums host_sums[0];
	struct disk_key disk_key[0];
	struct disk_sums disk_sums[0];
	struct resent resent[0];
} host_layouts = { .n_bytes = sizeof(struct host_event) };

/* ---- processes ---- */

#define N_ENDED 1024

struct life {
	u32 pid;
	u32 spare;
	u64 began; /* the number may be reused */
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, N_ENDED);
	__type(key, struct life);
	__type(value, u8);
} ended SEC(".maps");

SEC("?tp_btf/sched_process_fork")
int BPF_PROG(host_fork, struct task_struct *parent, struct task_struct *child)
{
	struct host_event *e;
	u8 one = 1;
	u32 pid;

	if (child->pid != child->tgid || !is_ours(parent))
		return 0;
	pid = child->tgid;
	bpf_map_update_elem(&kin, &pid, &one, BPF_ANY);
	e = host_event(HOST_FORK, bpf_ktime_get_ns(), child);
	if (!e)
		return 0;
	by(e, parent);
	bpf_ringbuf_submit(e, wakeup(&events));
	return 0;
}

SEC("?tp_btf/sched_process_exec")
int BPF_PROG(host_exec, struct task_struct *task)
{
	struct host_event *e;

	if (!is_ours(task))
		return 0;
	e = host_event(HOST_EXEC, bpf_ktime_get_ns(), task);
	if (e)
		bpf_ringbuf_submit(e, wakeup(&events));
	return 0;
}

/* Several threads that exit together all find that no thread is left: the first of them reports the exit. */
SEC("?tp_btf/sched_process_exit")
int BPF_PROG(host_exit, struct task_struct *task)
{
	struct task_struct___host *more = (void *)task, *leader = (void *)task->group_leader;
	struct life life = { .pid = task->tgid };
	struct host_event *e;
	u8 one = 1;

	if (task->signal->live.counter || !is_ours(task))
		return 0;
	life.began = leader->start_boottime;
	if (bpf_map_update_elem(&ended, &life, &one, BPF_NOEXIST))
		return 0;
	bpf_map_delete_elem(&kin, &life.pid);
	e = host_event(HOST_EXIT, bpf_ktime_get_ns(), task);
	if (!e)
		return 0;
	e->value = more->exit_code;
	bpf_ringbuf_submit(e, wakeup(&events));
	return 0;
}

SEC("?tp_btf/sched_migrate_task")
int BPF_PROG(host_migrate, struct task_struct *task)
{
	struct host_sums *sums;
	struct process *p;
	u32 index;

	if (!slot_of(task, &p, &index))
		return 0;
	sums = sums_of(task->tgid);
	if (sums)
		__sync_fetch_and_add(&sums->n_migrations, 1);
	return 0;
}

/* ---- signals ---- */

#define BIT(n) (1u << (n))
#define SIGNALS /* signals that stop, end or continue a process (numbers of x86 and arm64) */                \
	(BIT(1) | BIT(2) | BIT(3) | BIT(4) | BIT(6) | BIT(7) | BIT(8) | BIT(9) | BIT(11) | BIT(15) | BIT(18) | \
	 BIT(19) | BIT(20) | BIT(21) | BIT(22))
#define SIGNAL_IGNORED 1
#define CONTINUE 18 /* continues a stopped process, even if it is ignored */
#define FROM_KERNEL ((void *)1) /* SEND_SIG_PRIV */

SEC("?tp_btf/signal_generate")
int BPF_PROG(host_signal, int signal, void *info, struct task_struct *task, int group, int result)
{
	struct host_event *e;

	if (signal < 1 || signal > 31 || !(SIGNALS >> signal & 1))
		return 0;
	if ((result == SIGNAL_IGNORED && signal != CONTINUE) || !is_ours(task))
		return 0;
	e = host_event(HOST_SIGNAL, bpf_ktime_get_ns(), task);
	if (!e)
		return 0;
	e->value = signal;
	if (info != FROM_KERNEL)
		by(e, bpf_get_current_task_btf());
	bpf_ringbuf_submit(e, wakeup(&events));
	return 0;
}

/* ---- memory ---- */

INLINE void killed_for_memory(struct host_event *e)
{
	if (!e)
		return;
	by(e, bpf_get_current_task_btf()); /* the owner of the allocation */
	bpf_ringbuf_submit(e, wakeup(&events));
}

SEC("?tp_btf/mark_victim")
int BPF_PROG(host_victim, struct task_struct *task)
{
	if (is_ours(task))
		killed_for_memory(host_event(HOST_OOM_KILL, bpf_ktime_get_ns(), task));
	return 0;
}

/* Before 6.9 the tracepoint has the number only (commit 72ba14deb40a). */
SEC("?tp_btf/mark_victim")
int BPF_PROG(host_victim_6_8, int pid)
{
	struct host_event *e;

	if (!is_watched(pid))
		return 0;
	e = event(EVENT_HOST, bpf_ktime_get_ns(), pid, pid, LOST_HOST);
	if (!e)
		return 0;
	e->op = HOST_OOM_KILL;
	e->duration_ns = e->value = -1;
	killed_for_memory(e);
	return 0;
}

#define N_STALLS 4096

struct stall {
	s64 since_ns;
	u32 is_charged;
	u32 spare;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, N_STALLS);
	__type(key, u64); /* thread, kind */
	__type(value, struct stall);
} stalls SEC(".maps");

INLINE u64 stall_key(u64 id, u32 what)
{
	return (u64)what << 32 | (u32)id;
}

/* A thread starts to look for memory. Outside of a traced call, a GPU thread's time from now on is FAULT, on the CPU
 * and off. */
INLINE int stall_begins(u32 what)
{
	struct task_struct *task = bpf_get_current_task_btf();
	u64 id = bpf_get_current_pid_tgid(), key = stall_key(id, what), now;
	struct stall stall = {};
	struct process *p;
	struct slot *s;
	u32 index;

	if (!is_watched(id >> 32))
		return 0;
	stall.since_ns = bpf_ktime_get_ns();
	s = slot_of(task, &p, &index);
	if (s && !s->call && !s->off) {
		stall.is_charged = 1;
		s->call = FAULT;
		now = settle(p, s, index, state_of(s));
		raw(EVENT_ENTER, now, id >> 32, id, FAULT);
	}
	bpf_map_update_elem(&stalls, &key, &stall, BPF_ANY);
	return 0;
}

INLINE int stall_ends(u32 what, s64 value)
{
	struct task_struct *task = bpf_get_current_task_btf();
	u64 id = bpf_get_current_pid_tgid(), key = stall_key(id, what), now;
	struct host_sums *sums;
	struct host_event *e;
	struct stall *stall;
	struct process *p;
	struct slot *s;
	s64 since;
	u32 index;

	if (!is_watched(id >> 32))
		return 0;
	stall = bpf_map_lookup_elem(&stalls, &key);
	if (!stall)
		return 0;
	since = stall->since_ns;
	s = stall->is_charged ? slot_of(task, &p, &index) : NULL;
	bpf_map_delete_elem(&stalls, &key);
	if (s && s->call == FAULT) {
		s->call = 0;
		now = settle(p, s, index, state_of(s));
		raw(EVENT_RETURN, now, id >> 32, id, 0);
	}
	now = bpf_ktime_get_ns();
	if ((s64)now - since < cfg_slow_stall_ns) {
		sums = sums_of(id >> 32);
		if (sums) {
			__sync_fetch_and_add(&sums->n_short[what == HOST_COMPACTION], 1);
			__sync_fetch_and_add(&sums->short_ns[what == HOST_COMPACTION], now - since);
		}
		return 0;
	}
	e = host_event(what, since, task);
	if (!e)
		return 0;
	e->duration_ns = now - since;
	e->value = value;
	bpf_ringbuf_submit(e, wakeup(&events));
	return 0;
}

SEC("?tp_btf/mm_vmscan_direct_reclaim_begin")
int BPF_PROG(host_reclaim_begin)
{
	return stall_begins(HOST_RECLAIM);
}

SEC("?tp_btf/mm_vmscan_direct_reclaim_end")
int BPF_PROG(host_reclaim_end, unsigned long n_reclaimed)
{
	return stall_ends(HOST_RECLAIM, n_reclaimed);
}

/* For the limit of a control group. */
SEC("?tp_btf/mm_vmscan_memcg_reclaim_begin")
int BPF_PROG(host_group_reclaim_begin)
{
	return stall_begins(HOST_RECLAIM);
}

SEC("?tp_btf/mm_vmscan_memcg_reclaim_end")
int BPF_PROG(host_group_reclaim_end, unsigned long n_reclaimed)
{
	return stall_ends(HOST_RECLAIM, n_reclaimed);
}

SEC("?tp_btf/mm_compaction_begin")
int BPF_PROG(host_compaction_begin)
{
	return stall_begins(HOST_COMPACTION);
}

SEC("?tp_btf/mm_compaction_end")
int BPF_PROG(host_compaction_end)
{
	return stall_ends(HOST_COMPACTION, -1);
}
