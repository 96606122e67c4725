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
 * account then has the time of its return (see repair_missed_switch()). Both are counted.
 */
#ifndef STALLSCOPE_LEDGER_H
#define STALLSCOPE_LEDGER_H

#include "ring.h"

#define N_TRIES 16
#define MIN_STOLEN_NS 20000

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
INLINE void move_unreported(struct process *p, u32 from, u32 to, s64 ns, u64 now)
{
	s64 unreported = account(p, from, most_active(LOAD(&p->word)), now) - p->reported_ns[MASK(from - 1, 15)];

	if (ns > unreported)
		ns = unreported;
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
INLINE void repair_missed_switch(struct process *p, struct slot *s, u32 index, struct task_struct *task)
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
		move_unreported(p, was, is, ns, now);
	if (runnable > ns && !s->call)
		move_unreported(p, was, PREEMPTED, runnable - ns, now);
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
	move_unreported(p, state, PREEMPTED, stolen, now);
	raw(EVENT_OFF, now - stolen, task->tgid, task->pid, PREEMPTED);
	raw(EVENT_ON, now, task->tgid, task->pid, 0);
}

#endif
